"""Objects that record the options they were built with, for checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# Arguments that are objects, not options.
GIVEN = {"backbone", "num_classes", "model", "class_names", "horizon", "targets", "scale"}


class Remembering:
    """Base class of objects that record their keyword arguments as ``made_by``."""

    made_by: dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Self:  # noqa: D102
        instance = super().__new__(cls)
        object.__setattr__(instance, "made_by", _description(cls, options))
        return instance


def remembering(build: Callable[P, R]) -> Callable[P, R]:
    """Record a function's keyword arguments as ``made_by`` of the object that it builds."""

    @functools.wraps(build)
    def wrapper(*args: P.args, **options: P.kwargs) -> R:
        result: Any = build(*args, **options)
        result.made_by = _description(build, options)
        built: R = result
        return built

    return wrapper


def plain_config(value: Any) -> Any:
    """Return a value in the form of a config, objects as their ``_target_`` and options.

    Raises:
        TypeError: It holds an object that a config cannot name.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain_config(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain_config(_description(type(value), fields))
    raise TypeError(f"a config cannot hold a {type(value).__name__}")


def _description(build: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    stored_options = {key: value for key, value in options.items() if key not in GIVEN}
    return {"_target_": f"{build.__module__}.{build.__qualname__}", **stored_options}
