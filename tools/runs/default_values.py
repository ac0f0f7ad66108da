"""Options with their default value: the run is the same with or without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.engine.family import families
from tools.cli.catalogue import catalogue

TOKEN_MIXER, STOPPING = "backbone.token_mixer", "callbacks.early_stopping"
CHANNELS, RGB = "backbone.in_chans", 3
USUAL = {
    "keep_classifier": False,
    "keep_head": False,
    "start": "own",
    "held_out": 0.0,
}  # as in runs without them
GROUPS = ("data", "head", "task")  # groups that are built from their ``_target_``


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config in a form that is equal for all versions.

    A token mixer's name is one of its options. Early stopping has an explicit direction, or none
    without patience. Usual values of ``USUAL`` and the channels of RGB images are left out.
    """
    result = dict(config)
    if result.get(CHANNELS) == RGB:
        del result[CHANNELS]
    for key, value in USUAL.items():
        if result.get(key) == value:
            del result[key]
    family = families().get(str(result.get("task_name")))
    if result.get(f"{STOPPING}.patience") is None:
        result.pop(f"{STOPPING}.mode", None)
    elif result.get(f"{STOPPING}.mode") is None and family is not None:
        metric = str(result.get(f"{STOPPING}.metric") or family.monitor)
        result[f"{STOPPING}.mode"] = family.direction(metric.rpartition("/")[2])
    name = result.get(TOKEN_MIXER)
    if isinstance(name, str):
        del result[TOKEN_MIXER]
        result[f"{TOKEN_MIXER}.name"] = name
    return result


def is_default(config: Mapping[str, Any], key: str) -> bool:
    """Return True if an option has its default value."""
    group, _, name = key.rpartition(".")
    if key.startswith(f"{TOKEN_MIXER}."):
        defaults: Mapping[str, Any] = _token_mixer_defaults(config)
    elif group in ("optimizer", "schedule"):
        defaults = _training_defaults(config, group)
    else:
        return _is_target_default(config, group, name)
    return name in defaults and _tuples_to_lists(defaults[name]) == _tuples_to_lists(config[key])


def drop_defaults(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove options that have their default and are missing in some of the flat configs."""
    common = set.intersection(*map(set, configs)) if configs else set()
    return [
        {
            key: value
            for key, value in config.items()
            if key in common or not is_default(config, key)
        }
        for config in configs
    ]


def _token_mixer_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = catalogue().mixers.get(str(config.get(f"{TOKEN_MIXER}.name")), {})
    return {**entry.get("options", {})}


def _training_defaults(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    from backbones.options import defaults
    from tasks.engine.optimisation.optimizer import (
        build_optimizer,
        learning_rate_factor,
        optimizer_class,
    )

    if group == "schedule":
        return defaults(learning_rate_factor)
    try:
        options = defaults(optimizer_class(str(config.get("optimizer.name"))))
    except ValueError:  # an optimiser of another version, or of a missing package
        options = {}
    return {**options, **defaults(build_optimizer)}


def _is_target_default(config: Mapping[str, Any], group: str, name: str) -> bool:
    target = config.get(f"{group}._target_")
    if group.partition(".")[0] not in GROUPS or target is None:
        return False
    from tasks.engine.instantiate import has_default

    part = {"_target_": target, name: config[f"{group}.{name}"]}
    try:
        return has_default(part, group, name)
    except ValueError:  # from another checkout
        return False


def _tuples_to_lists(value: Any) -> Any:
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value
