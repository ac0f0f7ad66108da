"""The options of a builder: read from its signature, checked before it is called."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from backbones.options.values import check_value


def keywords(build: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function or class with their defaults."""
    parameters = inspect.signature(build).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


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
