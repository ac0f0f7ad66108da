"""MixerLab from Python: ``mixerlab.load``, ``create_backbone``, ``create_mixer`` and their lists.

Importing it finds the project's own packages, whatever the current folder holds: a ``tasks.py`` or
``tools.py`` beside a script would otherwise be found first. ``main`` is the command ``mixerlab``.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbones import create_backbone, create_mixer, list_backbones, list_mixers
    from tasks import load

ROOT = Path(__file__).resolve().parent
HELP = """usage: mixerlab COMMAND [key=value ...]

The words are those of python tools/COMMAND.py in a checkout; mixerlab COMMAND --help lists them.
"""
__all__ = ["create_backbone", "create_mixer", "list_backbones", "list_mixers", "load"]

sys.path.insert(0, str(ROOT))
try:
    for package in ("backbones", "heads", "tasks", "datamodules", "tools"):
        importlib.import_module(package)
finally:
    sys.path.remove(str(ROOT))


def __getattr__(name: str) -> Any:
    """Import a name on first use: with it comes torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["tasks" if name == "load" else "backbones"], name)


def main() -> int:
    """Run a command of ``tools`` in place of this process, or list them."""
    files = {file.stem: file for file in sorted((ROOT / "tools").glob("[!_]*.py"))}
    command, *words = sys.argv[1:] or ["--help"]
    if command in files:
        os.execv(sys.executable, [sys.executable, str(files[command]), *words])
    if command not in ("-h", "--help"):
        print(f"error: {command!r} is no command; mixerlab --help lists them", file=sys.stderr)
        return 2
    print(HELP)
    for name, file in files.items():
        summary = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        print(f"  {name:12} {summary.splitlines()[0]}")
    return 0
