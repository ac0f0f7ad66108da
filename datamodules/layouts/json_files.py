"""Reads values from the JSON files of annotation tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datamodules.files.integers import format_value
from datamodules.layouts.outlines import Point


def get_value(entry: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return an entry's value after a check of its type.

    Raises:
        ValueError: The value is missing or of another type.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be an object with {key!r}, got {format_value(entry)}")
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise ValueError(f"{where}: {key} must be of type {names}, got {format_value(value)}")
    return value


def get_number(entry: Any, key: str, where: str) -> float:
    """Return an entry's finite number."""
    return check_finite(get_value(entry, key, (int, float), where), f"{where}: {key}")


def get_points(entry: Any, where: str) -> list[Point]:
    """Return an entry's list "points" of pairs."""
    pairs = get_value(entry, "points", list, where)
    found = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where}: points must be pairs [x, y], got {format_value(pair)}")
        found.append((check_finite(pair[0], f"{where}: x"), check_finite(pair[1], f"{where}: y")))
    return found


def check_finite(value: Any, where: str) -> float:
    """Return a number after a check that it is finite."""
    if type(value) in (int, float) and abs(value) < 1e15:  # also false for NaN
        return float(value)
    raise ValueError(f"{where} must be a finite number, got {format_value(value)}")
