"""Mixers of other packages, which name their modules in the entry points ``mixerlab.mixers``.

    [project.entry-points."mixerlab.mixers"]
    my_mixer = "my_package.my_mixer"

A module registers its mixers by ``backbones.register_mixer`` when it is imported, as those of
``mixers/`` do. It is imported with them, at the first lookup of a mixer.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from backbones.importing import BrokenFileError

GROUP = "mixerlab.mixers"
VALUE = r"\w+(\.\w+)*(\s*:\s*\w+(\.\w+)*)?"  # a module, and a name in it


class Loading:
    """Record that the modules are imported, which is once per process."""

    started = False


def load_plugins() -> None:
    """Import the modules that installed packages name.

    Raises:
        BrokenFileError: An entry point is malformed, or its module cannot be imported; the message
            names its package.
    """
    if Loading.started:
        return
    Loading.started = True  # first, as a module may look up mixers
    for point in metadata.entry_points(group=GROUP):
        package = point.dist.name if point.dist else point.value
        if not re.fullmatch(VALUE, point.value.strip()):
            Loading.started = False
            raise BrokenFileError(
                f"the entry point {point.name} of the installed package {package} is "
                f"{point.value!r}, and {GROUP} takes the name of a module, such as "
                f'{point.name} = "my_package.my_mixer"; correct it in the pyproject.toml of '
                f"{package} and install it again, or uninstall {package}"
            )
        try:
            point.load()
        except (Exception, SystemExit) as error:
            Loading.started = False
            raise BrokenFileError(
                f"the mixer {point.name} of the installed package {package} ({point.value}) cannot "
                f"be imported: {type(error).__name__}: {error}; repair or uninstall {package}"
            ) from error


def describe_plugins() -> list[Any]:
    """Return names, versions and source files of the packages, which a cache depends on."""
    found: list[Any] = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
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
