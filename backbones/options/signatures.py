"""Options of a builder: read from its signature and checked before it is called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from backbones.options.suggestions import unknown
from backbones.options.values import check_value, with_whole_numbers

T = TypeVar("T")


def keywords(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of a function or class with their defaults."""
    parameters = inspect.signature(build).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def built_class(build: Callable[..., Any], base: type[T]) -> type[T]:
    """Return the class that a builder builds: itself, or a function's return annotation.

    Args:
        build: A class, or a function with or without a return annotation.
        base: Base class, returned if the function lacks an annotation.
    """
    result = build if inspect.isclass(build) else typing.get_type_hints(build).get("return")
    return result if inspect.isclass(result) and issubclass(result, base) else base


def check_builder(build: Callable[..., Any], label: str, filled: Collection[str] = ()) -> None:
    """Check that all options of a builder have defaults that can be typed in a command.

    Args:
        build: Function of one argument and, by name, the options.
        label: Name of the builder in messages.
        filled: Keyword-only parameters that the caller sets.

    Raises:
        ValueError: Names the parameter.
    """
    parameters = inspect.signature(build).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if by_position[1:]:
        raise ValueError(
            f"{label} takes {by_position[1]} by position; options are keyword-only: write "
            f"({by_position[0]}, *, {', '.join(by_position[1:])}, ...)"
        )
    for name, default in keywords(build).items():
        if name in filled:
            continue
        if default is inspect.Parameter.empty:
            raise ValueError(f"option {name} of {label} needs a default; add one")
        if not _is_plain(default):
            raise ValueError(
                f"{label} has the default {name}={default!r}, which cannot be typed; use a number, "
                "a text, true or false, null, or a list of these"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def check_arguments(call: Callable[..., Any], arguments: Mapping[str, Any], group: str) -> None:
    """Check names and types of arguments for a class or function.

    Args:
        call: Class or function with annotations; only plain values are checked.
        arguments: Arguments by name.
        group: Prefix of their names in messages.

    Raises:
        ValueError: The message names the option and its allowed values.
    """
    check_types(*_parameters(call), arguments, group)


def check_types(
    hints: Mapping[str, Any], takes_more: bool, arguments: Mapping[str, Any], group: str
) -> None:
    """Check names and types of arguments by the types of a signature.

    Raises:
        ValueError: The message names the option and its allowed values.
    """
    for name, value in arguments.items():
        if name in hints:
            check_value(f"{group}.{name}", value, hints[name])
        elif not takes_more:
            raise ValueError(unknown(f"option of {group}", name, hints))


def whole_arguments(call: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with 10.0 as 10 for parameters that take whole numbers only."""
    return with_whole_values(_parameters(call)[0], arguments)


def with_whole_values(hints: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with 10.0 as 10 where the types of a signature take whole numbers only."""
    return {
        name: with_whole_numbers(value, hints[name]) if name in hints else value
        for name, value in arguments.items()
    }


def check_complete(call: Callable[..., Any], names: Collection[str], group: str) -> None:
    """Check that all keyword-only parameters without default are given.

    Raises:
        ValueError: The message names the first missing option.
    """
    for name, default in keywords(call).items():
        if default is inspect.Parameter.empty and name not in names:
            raise ValueError(f"{group}.{name} is missing; pass {group}.{name}=...")


def defaults(call: Any) -> dict[str, Any]:
    """Return the defaults of a class or function by argument.

    A class with ``**options`` adds those of its next parent.
    """
    values: dict[str, Any] = {}
    for function in _functions(call):
        parameters = inspect.signature(function).parameters.values()
        for p in parameters:
            if p.default is not p.empty:
                values.setdefault(p.name, p.default)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return values


def _functions(call: Any) -> list[Any]:
    if not inspect.isclass(call):
        return [call]
    return [vars(cls)["__init__"] for cls in inspect.getmro(call) if "__init__" in vars(cls)]


def _parameters(call: Any) -> tuple[dict[str, Any], bool]:
    """Return the types of a call's arguments by name, and True if it takes any others.

    A class with ``**options`` adds those of its next parent.
    """
    types: dict[str, Any] = {}
    for function in _functions(call):
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self":
                types.setdefault(p.name, hints.get(p.name, Any))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return types, False
    return types, not inspect.isclass(call)
