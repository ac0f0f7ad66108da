"""Build what a config names, from a closed list, with errors that name the option."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from backbones.options import (
    check_arguments,
    check_complete,
    defaults,
    listed,
    whole_arguments,
)
from tasks.engine.old_names import current_target

# All that a config may have called, by the option that names it: configs come from command lines
# and from other people's run folders. Who adds a head or task adds its class here; under "data"
# every data module of the package DATA is allowed besides.
DATA = "datamodules"
TARGETS: dict[str, tuple[str, ...]] = {
    "data.augmentation": (
        "datamodules.images.transforms.LightAugmentation",
        "datamodules.images.transforms.PaperAugmentation",
    ),
    "head": (
        "heads.frozen.head.FrozenFeatures",
        "heads.linear.LinearClassifier",
        "heads.linear.LinearProbe",
        "heads.toolkits.detectors.build_detector",
        "heads.toolkits.segmentors.build_segmentor",
    ),
    "task": (
        "tasks.classification.task.ClassificationTask",
        "tasks.detection.task.DetectionTask",
        "tasks.segmentation.task.SegmentationTask",
    ),
}


def build(config: Mapping[str, Any], group: str, **given: Any) -> Any:
    """Call ``config[group]["_target_"]`` with the group's other entries and ``given``.

    Nested targets are built first.

    Args:
        config: The whole config, as plain values (no OmegaConf containers).
        group: Which part to build; error messages call its options ``group.option``.
        **given: Objects that no config can hold, such as the backbone.

    Raises:
        ValueError: A target that is not allowed, or an argument it does not take.
    """
    return _build(config[group], group, given)


def has_default(config: Mapping[str, Any], group: str, name: str) -> bool:
    """Return True if an option has the value that its target has without it.

    Raises:
        ValueError: A target that is not allowed.
    """
    known = defaults(_factory(config[group], group))
    return name in known and _plain(known[name]) == _plain(config[group][name])


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def with_whole_numbers(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return ``config[group]`` with 10.0 as 10 where its target takes whole numbers only.

    Raises:
        ValueError: A target that is not allowed.
    """
    return _with_whole_numbers(config[group], group)


def _with_whole_numbers(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    nested = {
        key: _with_whole_numbers(value, f"{group}.{key}") if _is_target(value) else value
        for key, value in config.items()
    }
    return whole_arguments(_factory(config, group), nested)


def _factory(config: Mapping[str, Any], group: str) -> Any:
    target, allowed = current_target(config.get("_target_")), allowed_targets(group)
    if target not in allowed:
        choice = f"one of {listed(allowed)}" if allowed else "left out"
        raise ValueError(
            f"{group}._target_={target} is refused: it must be {choice}; CONTRIBUTING.md says "
            "where a class of your own goes"
        )
    module, _, name = str(target).rpartition(".")
    return getattr(importlib.import_module(module), name)


def _build(config: Mapping[str, Any], group: str, given: Mapping[str, Any]) -> Any:
    factory = _factory(config, group)
    arguments = {
        key: _build(value, f"{group}.{key}", {}) if _is_target(value) else value
        for key, value in config.items()
        if key != "_target_"
    }
    if arguments.keys() & given.keys():
        name = min(arguments.keys() & given.keys())
        raise ValueError(f"{group}.{name} is set by the run itself; leave it out")
    arguments = whole_arguments(factory, arguments)
    check_complete(factory, {**arguments, **given}, group)
    check_arguments(factory, {**arguments, **given}, group)
    return factory(**arguments, **given)


def allowed_targets(group: str) -> tuple[str, ...]:
    """All that a config may name as this group's ``_target_``, by full names."""
    return _data_modules() if group == "data" else TARGETS.get(group, ())


@functools.cache
def _data_modules() -> tuple[str, ...]:
    """Return every class of the package DATA that says how a data set is built."""
    package = importlib.import_module(DATA)
    base = importlib.import_module(f"{DATA}.base").BaseDataModule
    found = []
    for file in pkgutil.walk_packages(package.__path__, f"{DATA}."):
        for name, content in vars(importlib.import_module(file.name)).items():
            is_own = isinstance(content, type) and content.__module__ == file.name
            is_own = is_own and issubclass(content, base) and content.build is not base.build
            if is_own and not _is_abstract(content):
                found.append(f"{file.name}.{name}")
    return tuple(found)


def _is_abstract(module: type) -> bool:
    """Return True if a class has an abstract method."""
    parts = (getattr(module, name) for name in dir(module))
    return any(getattr(part, "__isabstractmethod__", False) for part in parts)


def _is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
