"""Build what a config names, from a closed list, with errors that name the option."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbones.options import (
    check_arguments,
    check_complete,
    defaults,
    listed,
    whole_arguments,
)
from tasks.engine.family import families, imported
from tasks.engine.old_names import current_target

# Packages whose modules may be named in a config, by the option that names them: configs come from
# command lines and from other people's run folders. A module of HEADS or TRANSFORMS lists in its
# TARGETS what may be called; every data module of DATA and every family's task may.
DATA, HEADS, TRANSFORMS = "datamodules", "heads", "datamodules.images"


def build(options: Mapping[str, Any], group: str, **given: Any) -> Any:
    """Call the ``_target_`` of a group with the group's other options and ``given``.

    Nested targets are built first.

    Args:
        options: Options of the group, as plain values (no OmegaConf containers).
        group: Its name; error messages call its options ``group.option``.
        **given: Objects that no config can hold, such as the backbone.

    Raises:
        ValueError: A target that is not allowed, or an argument it does not take.
    """
    return _build(options, group, given)


def has_default(options: Mapping[str, Any], group: str, name: str) -> bool:
    """Return True if an option has the value that its target has without it.

    Raises:
        ValueError: A target that is not allowed.
    """
    known = defaults(_factory(options, group))
    return name in known and _plain(known[name]) == _plain(options[name])


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def check_group(options: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Check names and types of a group's options against the signature of its target.

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
    factory = _factory(config, group)
    nested = {
        key: _checked(value, f"{group}.{key}") if _is_target(value) else value
        for key, value in config.items()
    }
    target = {"_target_": nested.pop("_target_")}
    nested = whole_arguments(factory, nested)
    check_arguments(factory, nested, group)
    return target | nested


def check_target(config: Mapping[str, Any], group: str) -> str:
    """Return the current name of a group's ``_target_``.

    Raises:
        ValueError: A target that is not allowed.
    """
    target, allowed = current_target(config.get("_target_")), allowed_targets(group)
    if target not in allowed:
        choice = f"one of {listed(allowed)}" if allowed else "left out"
        raise ValueError(
            f"{group}._target_={target} is refused: it must be {choice}; CONTRIBUTING.md says "
            "where a class of your own goes"
        )
    return str(target)


def _factory(config: Mapping[str, Any], group: str) -> Any:
    return imported(check_target(config, group))


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
    arguments = whole_arguments(factory, arguments)  # runs of older releases
    check_complete(factory, {**arguments, **given}, group)
    return factory(**arguments, **given)


def allowed_targets(group: str) -> tuple[str, ...]:
    """Return all that a config may name as this group's ``_target_``, by full names."""
    if group == "data":
        return _data_modules()
    if group == "task":
        return tuple(sorted({family.task for family in families().values()}))
    package = {"head": HEADS, "data.augmentation": TRANSFORMS}.get(group)
    return _listed_targets(package) if package else ()


@functools.cache
def _listed_targets(package: str) -> tuple[str, ...]:
    """Return what the modules of a package list in TARGETS, read without importing them."""
    folder = Path(__file__).resolve().parents[2].joinpath(*package.split("."))
    found = []
    for file in sorted(folder.rglob("*.py")):
        module = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TARGETS":
                found += [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    return tuple(found)


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
