"""Keep the garbage collector away from what a run imports, none of which is garbage."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Exclude all current objects from later collections, each of which would take 0.25 s.

    Only the first call of a process does so: the networks of a sweep's earlier runs lie in cycles
    and are garbage.
    """
    if not gc.get_freeze_count():
        gc.freeze()
