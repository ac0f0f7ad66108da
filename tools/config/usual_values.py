"""Options that have their default: typed or left out, they make the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.engine.family import families

TOKEN_MIXER, STOPPING = "backbone.token_mixer", "callbacks.early_stopping"
GROUPS = ("data", "head", "task")  # which are built by their ``_target_``


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config in the one form in which configs of all versions are compared.

    A token mixer's name stands where its options stand, and early stopping has the direction that
    it follows; what stops or keeps nothing is left out.
    """
    found = dict(config)
    if not found.get("keep_classifier", True):
        del found["keep_classifier"]
    family = families().get(str(found.get("task_name")))
    if found.get(f"{STOPPING}.patience") is None:
        found.pop(f"{STOPPING}.mode", None)
    elif found.get(f"{STOPPING}.mode") is None and family is not None:
        metric = str(found.get(f"{STOPPING}.metric") or family.monitor)
        found[f"{STOPPING}.mode"] = family.direction(metric.rpartition("/")[2])
    name = found.get(TOKEN_MIXER)
    if isinstance(name, str):
        del found[TOKEN_MIXER]
        found[f"{TOKEN_MIXER}.name"] = name
    return found


def is_usual(config: Mapping[str, Any], key: str) -> bool:
    """Return True if an option has the value that a run has without it.

    Args:
        config: Values by dotted name.
        key: One of them.
    """
    group, _, name = key.rpartition(".")
    if key.startswith(f"{TOKEN_MIXER}."):
        defaults: Mapping[str, Any] = _of_token_mixer(config)
    elif group in ("optimizer", "schedule"):
        defaults = _of_training(config, group)
    else:
        return _is_of_target(config, group, name)
    return name in defaults and _plain(defaults[name]) == _plain(config[key])


def without_usual(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flat configs without the options that some of them lack and that have their default."""
    common = set.intersection(*map(set, configs)) if configs else set()
    return [
        {key: value for key, value in one.items() if key in common or not is_usual(one, key)}
        for one in configs
    ]


def _of_token_mixer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    from tools.cli.catalogue import catalogue

    known = catalogue().mixers.get(str(config.get(f"{TOKEN_MIXER}.name")), {})
    return {**known.get("options", {})}


def _of_training(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    from backbones.options import defaults
    from tasks.engine.optim import build_optimizer, learning_rate_factor, optimizer_class

    if group == "schedule":
        return defaults(learning_rate_factor)
    try:
        own = defaults(optimizer_class(str(config.get("optimizer.name"))))
    except ValueError:  # an optimiser of another version, or of a package that is missing
        own = {}
    return {**own, **defaults(build_optimizer)}


def _is_of_target(config: Mapping[str, Any], group: str, name: str) -> bool:
    target = config.get(f"{group}._target_")
    if group.partition(".")[0] not in GROUPS or target is None:
        return False
    from tasks.engine.instantiate import has_default

    part = {"_target_": target, name: config[f"{group}.{name}"]}
    try:
        return has_default({group: part}, group, name)
    except ValueError:  # of another checkout
        return False


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
