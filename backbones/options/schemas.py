"""Validation of files against schemas, with one sentence for the first error."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

M = TypeVar("M", bound=BaseModel)
SHOWN = 60  # characters of a value in a message


class ClosedPart(BaseModel):
    """Part of a file with strict types and without unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class OpenPart(ClosedPart):
    """Part of a file that may have further keys, as in newer versions."""

    model_config = ConfigDict(extra="allow")


def validate(schema: type[M], content: object) -> M:
    """Return a content as an instance of its schema.

    Raises:
        ValueError: The first wrong entry, its value, and the expected one.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise ValueError(describe_misfit(error)) from None


def describe_misfit(error: ValidationError) -> str:
    """Describe the first wrong entry: place, reason, value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(_excerpt(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    reason = reason[:1].lower() + reason[1:]
    if first["type"] in ("missing", "extra_forbidden"):
        problem = "missing" if first["type"] == "missing" else "unknown"
        return f"the entry {place} is {problem}"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        reason = "must be a dictionary"
    value = first["input"]
    text = _excerpt(repr(value)) if _is_plain(value) else type(value).__name__
    got = "" if first["type"] == "value_error" else f", got {text}"
    return f"{place or 'the content'} {reason}{got}"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _excerpt(value: object) -> str:
    text = str(value).encode("unicode_escape").decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
