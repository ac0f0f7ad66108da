"""Hosts and mixers of other packages, which name their modules in entry points.

    [project.entry-points."mixerlab.mixers"]
    my_mixer = "my_package.my_mixer"

    [project.entry-points."mixerlab.hosts"]
    my_host = "my_package.my_host"

A module registers by ``backbones.register_mixer`` or ``register_host`` when it is imported, as the
files of ``mixers/`` and ``hosts/`` do. It is imported when its name is looked up, or with all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from backbones.importing import BrokenFileError

GROUPS = {"mixers": "mixerlab.mixers", "hosts": "mixerlab.hosts"}  # by folder


def load_plugins(folder: str, name: str | None = None) -> None:
    """Import the modules that installed packages name.

    Args:
        folder: "mixers" or "hosts".
        name: Name of one entry point; None for all.

    Raises:
        BrokenFileError: Entry points are malformed, or a module cannot be imported; the message
            names its package.
    """
    for package in _packages():
        for point in package.entry_points.select(group=GROUPS[folder]):
            if name in (None, point.name):
                with _naming(package, f"{point.name} = {point.value}"):
                    point.load()


def describe_plugins() -> list[Any]:
    """Return names, versions and source files of the packages, which a cache depends on."""
    states: list[Any] = []
    for package in _packages():
        for group in GROUPS.values():
            for point in package.entry_points.select(group=group):
                states.append([point.name, point.value, package.version])
                with _naming(package, f"{point.name} = {point.value}"):
                    for file in _sources(re.split("[.:]", point.value)[0].strip()):
                        state = file.stat()
                        states.append([str(file), state.st_size, state.st_mtime_ns])
    return states


def _packages() -> list[metadata.Distribution]:
    """Return the installed packages with mixers or hosts, sorted by name."""
    packages: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        with _naming(package, "entry_points.txt"):
            points = package.entry_points
            if any(points.select(group=group) for group in GROUPS.values()):
                packages.setdefault(package.name, package)  # of two, Python imports the first
    return [packages[name] for name in sorted(packages)]


@contextlib.contextmanager
def _naming(package: metadata.Distribution, place: str) -> Iterator[None]:
    """Name the package in which something fails."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenFileError(
            f"the mixers of the installed package {package.name} cannot be imported ({place}): "
            f'{reason}; an entry point takes a module, such as my_mixer = "my_package.my_mixer": '
            f"repair the package, or uninstall {package.name}"
        ) from error


def _sources(package: str) -> Iterator[Path]:
    """Yield the source files of a module or package without importing it."""
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin)
