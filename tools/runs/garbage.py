"""Keeps the garbage collector away from what a run imports and builds, none of which is garbage.

Each of its passes over everything takes a quarter of a second once the toolkits are imported.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile, unless a library asks for it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_imports() -> None:
    """Leave all that there is now out of every later collection; call it after imports.

    It does so once in a process: the networks of a sweep's earlier runs lie in cycles and are
    garbage.
    """
    if not gc.get_freeze_count():
        gc.freeze()
