"""Provides our operators to an mmcv without compiled ones, and lets mmpretrain be imported.

MMDetection and MMSegmentation import ``mmcv._ext``, the operators that mmcv's build compiles and
plain pip leaves out. After ``import heads`` that import finds ``toolkits/mmcv_operators``. Compiled
operators take precedence. To run a toolkit's own script with our operators, type

    python -m heads.mmcv_finder SCRIPT ARGUMENTS

MMDetection imports mmpretrain, whose multimodal models need transformers 4. Beside a later one,
such as peft's, that import finds an empty package in their place.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

OPERATORS = "mmcv._ext"
MULTIMODAL = "mmpretrain.models.multimodal"
LAST_MAJOR = 4  # of transformers, for mmpretrain


class OperatorFinder(MetaPathFinder):
    """Import finder for ``mmcv._ext``, the last in ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of our operators; None for any other module."""
        if fullname != OPERATORS:
            return None
        return spec_from_file_location(
            fullname, Path(__file__).parent / "toolkits/mmcv_operators/__init__.py"
        )


class EmptyPackage(Loader):
    """Loader of a package without content."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class MultimodalFinder(MetaPathFinder):
    """Import finder for mmpretrain's multimodal models, the first in ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return an empty package beside a transformers that the models cannot use, else None."""
        if fullname != MULTIMODAL or _transformers_major() <= LAST_MAJOR:
            return None
        return ModuleSpec(fullname, EmptyPackage(), is_package=True)


def _transformers_major() -> int:
    try:
        return int(metadata.version("transformers").partition(".")[0])
    except metadata.PackageNotFoundError:
        return 0


def install() -> None:
    """Install the finders, once per process."""
    if not any(type(finder).__name__ == OperatorFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(OperatorFinder())
        sys.meta_path.insert(0, MultimodalFinder())


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
