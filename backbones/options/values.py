"""Check of plain values against type annotations, with messages for users of commands."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


def check_value(option: str, value: Any, hint: Any) -> None:
    """Check that a value has an annotated type.

    Raises:
        ValueError: The message names the option and its allowed values.
    """
    if not _fits(value, hint):
        raise ValueError(f"{option}={value} is not {_description(hint)}")


def with_whole_numbers(value: Any, hint: Any) -> Any:
    """Return a value with 10.0 as 10 wherever its annotated type takes whole numbers only."""
    if _fits(value, hint):
        return value
    converted = value
    if isinstance(value, float) and value.is_integer():
        converted = int(value)
    elif isinstance(value, list | tuple):
        for items in _item_hints(hint):
            converted = [with_whole_numbers(item, items) for item in value]
    return converted if _fits(converted, hint) else value


def _item_hints(hint: Any) -> list[Any]:
    """Return the allowed types of items of a type of lists, or of a union with one."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [items for choice in choices for items in _item_hints(choice)]
    return [choices[0]] if origin in (Sequence, tuple, list) else []


def check_odd(kernel_size: int | Sequence[int]) -> None:
    """Check that a kernel has a centre.

    Raises:
        ValueError: A side is even or not positive.
    """
    sides = [kernel_size] if isinstance(kernel_size, int) else kernel_size
    if any(side < 1 or side % 2 == 0 for side in sides):
        raise ValueError(f"kernel_size must be odd (1, 3, 5, 7, ...), got {kernel_size}")


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a plain value has an annotated type; types of objects fit everything."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in choices)
    if origin is Literal:
        return value in choices
    if hint in (int, float):
        numbers = int if hint is int else (int, float)
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if hint in (str, bool, types.NoneType):
        return isinstance(value, hint)
    if hint is Path:
        return isinstance(value, str | Path)
    if origin in (Sequence, tuple, list):
        items = isinstance(value, list | tuple)
        return items and all(_fits(item, choices[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping)
    return not isinstance(value, str | int | float | list | types.NoneType) or hint is Any


def _described_items(hint: Any) -> str:
    """Return the type of a list's items in words, empty for types of objects."""
    words = {int: "whole numbers", float: "numbers", str: "texts"}
    if typing.get_origin(hint) not in (Sequence, tuple, list):
        return words.get(hint, "")
    inner = _described_items(typing.get_args(hint)[0])
    return f"lists of {inner}" if inner else "lists"


def _description(hint: Any) -> str:
    """Return a type in words: ``a number or null``."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        literals = [c for c in choices if typing.get_origin(c) is Literal]
        if len(literals) > 1:  # one list of all values that they name
            names = dict.fromkeys(str(value) for c in literals for value in typing.get_args(c))
            rest = [_description(c) for c in choices if c not in literals]
            return " or ".join([f"one of {', '.join(names)}", *rest])
        return " or ".join(dict.fromkeys(_description(choice) for choice in choices))
    if origin is Literal:
        return f"one of {', '.join(map(str, choices))}"
    if origin is Mapping:
        return "a group of options"
    if origin in (Sequence, tuple, list):
        items = _described_items(choices[0])
        return f"a list of {items}" if items else "a list"
    words = {
        int: "a whole number", float: "a number", bool: "true or false", str: "a text",
        Path: "a path", types.NoneType: "null",
    }  # fmt: skip
    return words.get(hint, getattr(hint, "__name__", str(hint)))
