"""Checks of values: options, integers that other tools may write as 128.0, and whole contents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, Strict, ValidationError

from datamodules.files.folders import first_few

EXACT = 2**53  # the floats above it skip integers
# What conversions, look-ups and validators raise over wrong content.
FAULTS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
T = TypeVar("T")


def check_option(name: str, value: T, valid: object, rule: str) -> T:
    """Return the value of an option.

    Args:
        name: Name of the option, without ``data.``.
        value: Its value.
        valid: True, or a filled list, if the value follows the rule.
        rule: Continues "data.<name> must be".

    Raises:
        ValueError: The value breaks the rule.
    """
    if not valid:
        raise ValueError(f"data.{name} must be {rule}, got {format_value(value)}")
    return value


def refuse(where: object, faults: Mapping[str, object]) -> None:
    """Raise an error for the first fault that is there.

    Args:
        where: File or folder, which begins the message; empty inside ``file_errors``.
        faults: By description, a condition, or the places that have the fault, for the message.

    Raises:
        ValueError: A condition is true, or a list of places is filled.
    """
    for fault, places in faults.items():
        if places:
            listing = f": {first_few(places)}" if isinstance(places, Collection) else ""
            raise ValueError(f"{where} {fault}{listing}".lstrip())


def integer_value(value: Any) -> int:
    """Return an integer, or a float that equals one, as an int.

    Raises:
        ValueError: The value is of another kind. The message continues the value's name.
    """
    if type(value) is int:
        return value
    integral = isinstance(value, float) and value.is_integer()
    if integral and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    reason = "; floats above 2^53 are not exact, write the digits" if integral else ""
    raise ValueError(f"must be an integer, got {format_value(value)}{reason}")


# Parts of the schemas of files.
Integer = Annotated[int, BeforeValidator(integer_value)]
Text = Annotated[str, Strict(), Field(min_length=1)]


def integer_list(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Return integers, or floats that equal integers, as a tuple of ints.

    Raises:
        ValueError: An item is of another kind; the message names the list and the position.
    """
    numbers = []
    for place, value in enumerate(values):
        with file_errors(f"{name}[{place}]", ""):
            numbers.append(integer_value(value))
    return tuple(numbers)


def format_value(value: object) -> str:
    """Return a value for messages: text in double quotes, at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an integer of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())  # arrays have several lines
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def file_errors(where: object, mark: str = ":") -> Iterator[None]:
    """Name a file, or a place in it, in the errors of reading its content.

    Args:
        where: The file or place.
        mark: Follows it in the message.

    Raises:
        ValueError: The content is wrong: a validator, a conversion or a look-up failed.
    """
    try:
        yield
    except FAULTS as error:
        reason = _describe(error) if isinstance(error, ValidationError) else str(error)
        lacks = "lacks " * isinstance(error, KeyError)
        is_named = reason.startswith(str(where))
        raise ValueError(reason if is_named else f"{where}{mark} {lacks}{reason}") from None


def _describe(error: ValidationError) -> str:
    """Return place, reason and value of the first wrong entry of a content."""
    first = error.errors(include_url=False)[0]
    *parents, last = first["loc"] or ("the content",)
    place = _place(parents)
    if first["type"] == "missing":
        keys = format_value(sorted(map(str, first["input"])))
        return f"{place or 'the content'} lacks {last!r}, found {keys}"
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    got = "" if first["type"] == "value_error" else f", got {format_value(first['input'])}"
    return f"{_place([*parents, last])} {reason[:1].lower()}{reason[1:]}{got}"


def _place(parts: Iterable[int | str]) -> str:
    """Return a place in a content, such as ``images[2]: id``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f"{': ' * bool(text)}{part}"
    return text
