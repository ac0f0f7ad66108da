"""Build what a config names, from an allow-list, with errors that name the key and the choices."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

# Configs come from files and command lines: they may name our own parts, never an arbitrary function.
ALLOWED = ("datamodules.", "heads.", "tasks.")


def build(config: Mapping[str, Any], **given: Any) -> Any:
    """Call ``config["_target_"]`` with the other entries and ``given``; nested targets are built first.

    Args:
        config: Plain values (no OmegaConf containers).
        **given: Objects that no config can hold, such as the backbone.

    Raises:
        ValueError: A target outside our packages, or an argument it does not take.
    """
    target = config["_target_"]
    if not target.startswith(ALLOWED):
        raise ValueError(
            f"_target_={target} is refused: it must start with one of {', '.join(ALLOWED)}"
        )
    module, _, name = target.rpartition(".")
    factory = getattr(importlib.import_module(module), name)
    arguments = {key: _value(value) for key, value in config.items() if key != "_target_"}
    _check_arguments(factory, arguments | given)
    return factory(**arguments, **given)


def _value(value: Any) -> Any:
    return build(value) if isinstance(value, Mapping) and "_target_" in value else value


def _check_arguments(factory: Any, arguments: Mapping[str, Any]) -> None:
    names = _parameters(factory)
    for key in arguments:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(names)}"
            raise ValueError(f"{factory.__name__} has no option {key!r}; {hint}")


def _parameters(factory: Any) -> list[str]:
    """What a factory takes; a class that takes ``**options`` takes what its next parent takes."""
    calls = [factory]
    if inspect.isclass(factory):
        calls = [
            vars(cls)["__init__"] for cls in inspect.getmro(factory) if "__init__" in vars(cls)
        ]
    names: list[str] = []
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return sorted(set(names) - {"self"})
