"""Mixers of other packages, which name their modules in the entry points ``mixerlab.mixers``.

    [project.entry-points."mixerlab.mixers"]
    my_mixer = "my_package.my_mixer"

A module registers its mixers by ``backbones.register_mixer`` when it is imported, as those of
``mixers/`` do. It is imported with them, at the first lookup of a mixer.
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

GROUP = "mixerlab.mixers"


class Loading:
    """Record that the modules are imported, which is once per process."""

    started = False


def load_plugins() -> None:
    """Import the modules that installed packages name.

    Raises:
        BrokenFileError: Entry points are malformed, or a module cannot be imported; the message
            names its package.
    """
    if Loading.started:
        return
    Loading.started = True  # first, as a module may look up mixers
    for package in _packages():
        for point in package.entry_points.select(group=GROUP):
            with _naming(package, f"{point.name} = {point.value}"):
                point.load()


def describe_plugins() -> list[Any]:
    """Return names, versions and source files of the packages, which a cache depends on."""
    found: list[Any] = []
    for package in _packages():
        for point in package.entry_points.select(group=GROUP):
            found.append([point.name, point.value, package.version])
            with _naming(package, f"{point.name} = {point.value}"):
                for file in _sources(re.split("[.:]", point.value)[0].strip()):
                    state = file.stat()
                    found.append([str(file), state.st_size, state.st_mtime_ns])
    return found


def _packages() -> list[metadata.Distribution]:
    """Return the installed packages with mixers, sorted by name."""
    packages: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        with _naming(package, "entry_points.txt"):
            if package.entry_points.select(group=GROUP):
                packages.setdefault(package.name, package)  # of two, Python imports the first
    return [packages[name] for name in sorted(packages)]


@contextlib.contextmanager
def _naming(package: metadata.Distribution, place: str) -> Iterator[None]:
    """Name the package in which something fails."""
    try:
        yield
    except (Exception, SystemExit) as error:
        Loading.started = False
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenFileError(
            f"the mixers of the installed package {package.name} cannot be imported ({place}): "
            f'{reason}; {GROUP} takes modules, such as my_mixer = "my_package.my_mixer": repair '
            f"the package, or uninstall {package.name}"
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
