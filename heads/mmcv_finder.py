"""Gives mmcv our operators where it has none of its own, so that nothing has to be compiled.

MMDetection and MMSegmentation import ``mmcv._ext``, the operators that mmcv's build compiles. Plain
pip leaves them out. ``import heads`` lets that import find ``toolkits/mmcv_operators`` instead; an
mmcv with compiled operators is found first and stays as it is. A script of a toolkit, which knows
nothing of ours, runs with them as

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
    """The last to be asked for a module: knows ``mmcv._ext`` where nobody else did."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where our operators are."""
        if fullname != OPERATORS:
            return None
        return spec_from_file_location(
            fullname, Path(__file__).parent / "toolkits/mmcv_operators/__init__.py"
        )


def install() -> None:
    """Let the toolkits find our operators, once per process."""
    if not any(type(finder).__name__ == OperatorFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(OperatorFinder())


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
