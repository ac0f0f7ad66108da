"""The options of a builder: read from its signature, checked before it is called."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


def keywords(build: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function or class with their defaults."""
    parameters = inspect.signature(build).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def unknown(what: str, name: str, known: Collection[str], summary: str = "") -> str:
    """The message that refuses a name: what is near to it, or all that there is.

    Args:
        what: What the name would be of.
        name: The name.
        known: The names that there are.
        summary: Said of them instead where they are too many for a message.
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    summary = summary or f"{', '.join(known) or 'none'}."
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {summary}"
    return f"there is no {what} called {name!r}; {hint}"


def check_arguments(call: Callable[..., Any], arguments: Mapping[str, Any], group: str) -> None:
    """Refuse arguments that a class or function does not take, by name or by type.

    Args:
        call: Its annotations are read; what they say beyond plain values is not checked.
        arguments: By name.
        group: Put before their names in messages.

    Raises:
        ValueError: Names the option and what it may be.
    """
    known, takes_more = _parameters(call)
    for name, value in arguments.items():
        if name in known:
            check_value(f"{group}.{name}", value, known[name])
        elif not takes_more:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"there is no option {group}.{name}; {hint}")


def check_complete(call: Callable[..., Any], names: Collection[str], group: str) -> None:
    """Refuse arguments that lack what a class or function has no default for.

    Raises:
        ValueError: Names the first option that is missing.
    """
    for name, default in keywords(call).items():
        if default is inspect.Parameter.empty and name not in names:
            raise ValueError(f"{group}.{name} is missing; pass {group}.{name}=...")


def check_value(option: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of an annotated type.

    Raises:
        ValueError: Names the option and what it may be.
    """
    if _fits(value, hint):
        return
    if _fits(_made_finite(value), hint):
        raise ValueError(f"{option}={value} is not finite; give {_described(hint)}")
    raise ValueError(f"{option}={value} is not {_described(hint)}")


def check_odd(kernel_size: int | Sequence[int]) -> None:
    """Refuse a kernel without a centre.

    Raises:
        ValueError: A side that is even or not positive.
    """
    sides = [kernel_size] if isinstance(kernel_size, int) else kernel_size
    if any(side < 1 or side % 2 == 0 for side in sides):
        raise ValueError(f"kernel_size must be odd (1, 3, 5, 7, ...), got {kernel_size}")


def _parameters(call: Any) -> tuple[dict[str, Any], bool]:
    """Types of what a call takes by name, and whether it takes anything else.

    A class that takes ``**options`` takes what its next parent takes.
    """
    calls = [call]
    if inspect.isclass(call):
        calls = [vars(cls)["__init__"] for cls in inspect.getmro(call) if "__init__" in vars(cls)]
    known: dict[str, Any] = {}
    for function in calls:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self":
                known.setdefault(p.name, hints.get(p.name, Any))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return known, False
    return known, not inspect.isclass(call)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of an annotated type; other types than plain ones fit everything."""
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


def _made_finite(value: Any) -> Any:
    """The value with a finite number wherever it holds an infinite one."""
    if isinstance(value, list | tuple):
        return [_made_finite(item) for item in value]
    return 1 if isinstance(value, float) and math.isinf(value) else value


def _described(hint: Any) -> str:
    """A type in words: ``a number or null``."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        literals = [c for c in choices if typing.get_origin(c) is Literal]
        if len(literals) > 1:  # one list of all values that they name
            named = dict.fromkeys(str(value) for c in literals for value in typing.get_args(c))
            rest = [_described(c) for c in choices if c not in literals]
            return " or ".join([f"one of {', '.join(named)}", *rest])
        return " or ".join(dict.fromkeys(_described(choice) for choice in choices))
    if origin is Literal:
        return f"one of {', '.join(map(str, choices))}"
    if origin in (Sequence, tuple, list, Mapping):
        return "a group of options" if origin is Mapping else "a list"
    words = {
        int: "a whole number", float: "a number", bool: "true or false", str: "a text",
        Path: "a path", types.NoneType: "null",
    }  # fmt: skip
    return words.get(hint, getattr(hint, "__name__", str(hint)))
