"""Provides our operators to an mmcv that was installed without compiled ones.

MMDetection and MMSegmentation import ``mmcv._ext``, the operators that mmcv's build compiles and
plain pip leaves out. After ``import heads`` that import finds ``toolkits/mmcv_operators``. Compiled
operators take precedence. To run a toolkit's own script with our operators, type

    python -m heads.mmcv_finder SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

OPERATORS = "mmcv._ext"


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


def install() -> None:
    """Install the finder, once per process."""
    if not any(type(finder).__name__ == OperatorFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(OperatorFinder())


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
