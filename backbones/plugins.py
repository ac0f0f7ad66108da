"""Hosts and mixers of other packages, which name their modules in entry points.

    [project.entry-points."mixerlab.mixers"]
    my_mixer = "my_package.my_mixer"

    [project.entry-points."mixerlab.hosts"]
    my_host = "my_package.my_host"

A module registers by ``backbones.register_mixer`` or ``register_host`` when it is imported, as the
files of ``mixers/`` and ``hosts/`` do. It is imported when its name is looked up, or with all.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from backbones.importing import BrokenFileError

GROUPS = {"mixers": "mixerlab.mixers", "hosts": "mixerlab.hosts"}  # by folder
VALUE = r"\w+(\.\w+)*(\s*:\s*\w+(\.\w+)*)?"  # a module, and a name in it


def load_plugins(folder: str, name: str | None = None) -> None:
    """Import the modules that installed packages name.

    Args:
        folder: "mixers" or "hosts".
        name: Name of one entry point; None for all.

    Raises:
        BrokenFileError: An entry point is malformed, or its module cannot be imported; the message
            names its package.
    """
    for point in metadata.entry_points(group=GROUPS[folder]):
        if name not in (None, point.name):
            continue
        package = point.dist.name if point.dist else point.value
        if not re.fullmatch(VALUE, point.value.strip()):
            raise BrokenFileError(
                f"the entry point {point.name} of the installed package {package} is "
                f"{point.value!r}, and {point.group} takes the name of a module, such as "
                f'{point.name} = "my_package.my_{folder[:-1]}"; correct it in the pyproject.toml '
                f"of {package} and install it again, or uninstall {package}"
            )
        try:
            point.load()
        except (Exception, SystemExit) as error:
            raise BrokenFileError(
                f"the {folder[:-1]} {point.name} of the installed package {package} "
                f"({point.value}) cannot be imported: {type(error).__name__}: {error}; repair or "
                f"uninstall {package}"
            ) from error


def describe_plugins() -> list[Any]:
    """Return names, versions and source files of the packages, which a cache depends on."""
    found: list[Any] = []
    points = [point for group in GROUPS.values() for point in metadata.entry_points(group=group)]
    for point in sorted(points, key=lambda one: one.name):
        found.append([point.name, point.value, point.dist.version if point.dist else ""])
        for file in _sources(re.split("[.:]", point.value)[0].strip()):
            state = file.stat()
            found.append([str(file), state.st_size, state.st_mtime_ns])
    return found


def _sources(package: str) -> Iterator[Path]:
    """Yield the source files of a module or package without importing it."""
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin)
