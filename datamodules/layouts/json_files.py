"""Reads values of JSON files of annotation tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datamodules.files.whole_numbers import shown
from datamodules.layouts.outlines import Point


def get(entry: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return an entry's value of a kind.

    Raises:
        ValueError: It is missing or of another kind.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be an object with {key!r}, got {shown(entry)}")
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise ValueError(f"{where}: {key} must be of type {names}, got {shown(value)}")
    return value


def number(entry: Any, key: str, where: str) -> float:
    """Return an entry's finite number."""
    return finite(get(entry, key, (int, float), where), f"{where}: {key}")


def points(entry: Any, where: str) -> list[Point]:
    """Return an entry's list "points" of pairs."""
    pairs = get(entry, "points", list, where)
    found = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where}: points must be pairs [x, y], got {shown(pair)}")
        found.append((finite(pair[0], f"{where}: x"), finite(pair[1], f"{where}: y")))
    return found


def finite(value: Any, where: str) -> float:
    """Return a number that is neither infinite nor NaN."""
    if type(value) in (int, float) and abs(value) < 1e15:  # also false for NaN
        return float(value)
    raise ValueError(f"{where} must be a finite number, got {shown(value)}")
