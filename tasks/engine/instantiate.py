"""Build what a config names, from a closed list, with errors that name the option."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from backbones.importing import read_declarations
from backbones.options import (
    check_complete,
    check_types,
    defaults,
    listed,
    whole_arguments,
    with_whole_values,
)
from tasks.engine.family import families, family_of_task, imported
from tasks.engine.run_folder.earlier_releases import current_target
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.written_signatures import read_definitions, read_signature

# Packages whose modules may be named in a config, by the option that names them: configs come from
# command lines and from other people's run folders. A module of heads or transforms lists in its
# TARGETS what may be called; every data module and every family's task may.
PACKAGES = {"data": "datamodules", "head": "heads", "data.augmentation": "datamodules.images"}
# Groups without a target: the function that takes their options.
CALLED = {
    "optimizer": "tasks.engine.optimisation.optimizer.build_optimizer",
    "schedule": "tasks.engine.optimisation.optimizer.learning_rate_factor",
}


def build(options: Mapping[str, Any], group: str, **objects: Any) -> Any:
    """Call the ``_target_`` of a group with the group's other options and ``objects``.

    Nested targets are built first.

    Args:
        options: Options of the group, as plain values (no OmegaConf containers).
        group: Its name; error messages call its options ``group.option``.
        **objects: Objects that no config can hold, such as the backbone.

    Raises:
        ValueError: A target that is not allowed, or an argument it does not take.
    """
    return _build(options, group, objects)


def has_default(options: Mapping[str, Any], group: str, name: str) -> bool:
    """Return True if an option has the value that its target has without it.

    Raises:
        ValueError: A target that is not allowed.
    """
    values = defaults(_factory(options, group))
    return name in values and _as_lists(values[name]) == _as_lists(options[name])


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def check_group(options: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Check names and types of a group's options against the signature that its target's file has.

    Args:
        options: Options of the group, as plain values, with the targets inside it.
        group: Its name.

    Returns:
        The options, with 10.0 as 10 where the target takes whole numbers only.

    Raises:
        ValueError: A target that is not allowed, an unknown option, or a value of another type.
    """
    return _checked(options, group)


def _checked(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    target = current_target(config.get("_target_"))
    if not _is_listed(target, group):
        check_target(config, group)
    signature = read_signature(target)
    nested = {
        key: _checked(value, f"{group}.{key}") if _is_target(value) else value
        for key, value in config.items()
        if key != "_target_"
    }
    nested = with_whole_values(signature.types, nested)
    check_types(signature.types, signature.takes_more, nested, group)
    return {"_target_": config["_target_"], **nested}


def check_options(config: RunConfig) -> RunConfig:
    """Check the options of a task, before anything is imported; a backbone checks its own.

    Returns:
        The config, with 10.0 as 10 where whole numbers are taken.

    Raises:
        ValueError: Names the option and the nearest valid one.
    """
    for group, function in CALLED.items():
        signature, options = read_signature(function), getattr(config, group)
        for name in signature.required:
            if name not in options:
                raise ValueError(f"{group}.{name} is missing; pass {group}.{name}=...")
        check_types(signature.types, signature.takes_more, options, group)
    groups = ("data", "head", "task")
    return config.model_copy(
        update={group: check_group(getattr(config, group), group) for group in groups}
    )


def check_target(config: Mapping[str, Any], group: str) -> str:
    """Return the current name of a group's ``_target_``.

    Raises:
        ValueError: A target that is not allowed.
    """
    target = current_target(config.get("_target_"))
    if not _is_allowed(target, group):
        targets = allowed_targets(group)
        choice = f"one of {listed(targets)}" if targets else "left out"
        raise ValueError(
            f"{group}._target_={target} is refused: it must be {choice}; CONTRIBUTING.md says "
            "where a class of your own goes"
        )
    return str(target)


def _is_allowed(target: Any, group: str) -> bool:
    """Return True if a group may name a target, of which it imports the file alone."""
    return _is_listed(target, group) and (group != "data" or _is_data_module(target))


def _is_listed(target: Any, group: str) -> bool:
    """Return True if the file of a target, or an installed package, declares it for a group."""
    if not isinstance(target, str):
        return False
    if group == "task":
        return family_of_task([target]) is not None
    module, _, name = target.rpartition(".")
    if group not in PACKAGES or not module.startswith(f"{PACKAGES[group]}."):
        return group == "data" and target in _installed_classes()
    definitions = read_definitions(module)
    if group == "data":
        return isinstance(definitions.get(name), ast.ClassDef)
    targets = definitions.get("TARGETS")
    return isinstance(targets, ast.Assign) and name in ast.literal_eval(targets.value)


def _factory(config: Mapping[str, Any], group: str) -> Any:
    return imported(check_target(config, group))


def _build(config: Mapping[str, Any], group: str, more_arguments: Mapping[str, Any]) -> Any:
    factory = _factory(config, group)
    arguments = {
        key: _build(value, f"{group}.{key}", {}) if _is_target(value) else value
        for key, value in config.items()
        if key != "_target_"
    }
    if arguments.keys() & more_arguments.keys():
        name = min(arguments.keys() & more_arguments.keys())
        raise ValueError(f"{group}.{name} is set by the run itself; leave it out")
    arguments = whole_arguments(factory, arguments)  # runs of older releases
    check_complete(factory, {**arguments, **more_arguments}, group)
    return factory(**arguments, **more_arguments)


def allowed_targets(group: str) -> tuple[str, ...]:
    """Return all that a config may name as this group's ``_target_``, by full names, sorted."""
    if group == "task":
        return tuple(sorted({family.task for family in families().values()}))
    if group == "data":
        classes = read_declarations(PACKAGES[group], r"^class (\w+)")
        names = [*(f"{module}.{name}" for module, name in classes), *_installed_classes()]
        return tuple(sorted(filter(_is_data_module, names)))
    package = PACKAGES.get(group)
    lists = read_declarations(package, r"^TARGETS = (\(.*\))") if package else ()
    return tuple(
        sorted(f"{module}.{name}" for module, text in lists for name in ast.literal_eval(text))
    )


@functools.cache
def _installed_classes() -> tuple[str, ...]:
    """Return the data modules that installed packages name in entry points ``mixerlab.data``."""
    return tuple(point.value.replace(":", ".") for point in entry_points(group="mixerlab.data"))


def _is_data_module(name: str) -> bool:
    """Return True for a concrete data module that says how a data set is built."""
    base, content = imported("datamodules.base.BaseDataModule"), imported(name)
    is_module = isinstance(content, type) and issubclass(content, base)
    return is_module and content.build is not base.build and not _is_abstract(content)


def _is_abstract(module: type) -> bool:
    """Return True if a class has an abstract method."""
    parts = (getattr(module, name) for name in dir(module))
    return any(getattr(part, "__isabstractmethod__", False) for part in parts)


def _is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
