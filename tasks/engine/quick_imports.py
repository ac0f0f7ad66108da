"""Imports of torch, Lightning and timm without what they bring along for others."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

LIBRARIES = ("lightning.pytorch", "timm")
LEFT_OUT = "wandb"  # of timm's summaries, which we leave aside
# torchmetrics adds a name to it for a package of audio.
SIGNAL, NAME = "scipy.signal", "hamming"


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import in three fifths of the time, as a context manager.

    The garbage collector pauses, since imported objects stay, and modules that only other users of
    the libraries need stay out of them. Afterwards these import as ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        _import_libraries()
        yield
    finally:
        if enabled:
            gc.enable()


def _import_libraries() -> None:
    signal: Any = ModuleType(SIGNAL)
    setattr(signal, NAME, None)
    absent = {LEFT_OUT: None, SIGNAL: signal}
    absent = {name: module for name, module in absent.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        for name in LIBRARIES:
            importlib.import_module(name)
    finally:
        for name in absent:
            del sys.modules[name]
