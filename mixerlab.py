"""MixerLab from Python: ``mixerlab.load``, ``create_backbone``, ``create_mixer`` and their lists.

Importing it finds the project's own packages, whatever the current folder holds: a ``tasks.py`` or
``tools.py`` beside a script would otherwise be found first.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent)

sys.path.insert(0, ROOT)
try:
    for name in ("backbones", "heads", "tasks", "datamodules", "tools"):
        importlib.import_module(name)
finally:
    sys.path.remove(ROOT)

from backbones import create_backbone, create_mixer, list_backbones, list_mixers  # noqa: E402
from tasks import load  # noqa: E402

__all__ = ["create_backbone", "create_mixer", "list_backbones", "list_mixers", "load"]
