"""Contents of files against their schemas, with one sentence for what does not fit."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

M = TypeVar("M", bound=BaseModel)
SHOWN = 60  # characters of a value in a message


class Part(BaseModel):
    """A part of a file: values keep their types, and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class OpenPart(Part):
    """A part of a file that may have further keys, as those of newer versions have."""

    model_config = ConfigDict(extra="allow")


def validate(schema: type[M], content: object) -> M:
    """Return a content as an instance of its schema.

    Raises:
        ValueError: Names the first entry that does not fit, its value, and what is expected.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise ValueError(describe_misfit(error)) from None


def describe_misfit(error: ValidationError) -> str:
    """Describe the first entry that does not fit: place, reason, value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(_short(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    reason = reason[:1].lower() + reason[1:]
    if first["type"] in ("missing", "extra_forbidden"):
        problem = "missing" if first["type"] == "missing" else "unknown"
        return f"the entry {place} is {problem}"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        reason = "must be a dictionary"
    if not _is_plain(first["input"]):
        return f"{place or 'the content'} {reason}, got {type(first['input']).__name__}"
    return f"{place or 'the content'} {reason}, got {_short(repr(first['input']))}"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _short(value: object) -> str:
    text = str(value).encode("unicode_escape").decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
