"""Checks of integers, which other tools may write as 128.0."""

from __future__ import annotations

import json
from collections.abc import Iterable
from numbers import Integral
from typing import Any

EXACT = 2**53  # the floats above it skip integers


def integer_value(value: Any) -> int:
    """Return an integer, or a float that equals one, as an int.

    Raises:
        ValueError: The value is of another kind. The message continues the value's name.
    """
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    large = isinstance(value, float) and value.is_integer()
    reason = "; floats above 2^53 are not exact, write the digits" if large else ""
    raise ValueError(f"must be an integer, got {format_value(value)}{reason}")


def integer_list(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Return integers, or floats that equal integers, as a tuple of ints.

    Raises:
        ValueError: An item is of another kind; the message names the list and the position.
    """
    numbers = []
    for place, value in enumerate(values):
        try:
            numbers.append(integer_value(value))
        except ValueError as error:
            raise ValueError(f"{name}[{place}] {error}") from None
    return tuple(numbers)


def format_value(value: object) -> str:
    """Return a value for messages: text in double quotes, at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an integer of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())  # arrays have several lines
    return text if len(text) <= 60 else f"{text[:57]}..."
