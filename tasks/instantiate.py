"""Build what a config names, from an allow-list, with errors that name the option."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from backbones.options import check_arguments

# Configs come from files and command lines: they may name our own parts, never any function.
ALLOWED = ("datamodules.", "heads.", "tasks.")


def build(config: Mapping[str, Any], group: str, **given: Any) -> Any:
    """Call ``config[group]["_target_"]`` with the group's other entries and ``given``.

    Nested targets are built first.

    Args:
        config: The whole config, as plain values (no OmegaConf containers).
        group: Which part to build; error messages call its options ``group.option``.
        **given: Objects that no config can hold, such as the backbone.

    Raises:
        ValueError: A target outside our packages, or an argument it does not take.
    """
    return _build(config[group], group, given)


def _build(config: Mapping[str, Any], group: str, given: Mapping[str, Any]) -> Any:
    target = config["_target_"]
    if not target.startswith(ALLOWED):
        raise ValueError(
            f"{group}._target_={target} is refused: it must start with one of {', '.join(ALLOWED)}"
        )
    module, _, name = target.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        factory = None
    if factory is None:
        raise ValueError(f"{group}._target_={target} is refused: there is no such class")
    arguments = {
        key: _build(value, f"{group}.{key}", {}) if _is_target(value) else value
        for key, value in config.items()
        if key != "_target_"
    }
    check_arguments(factory, {**arguments, **given}, group)
    return factory(**arguments, **given)


def _is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
