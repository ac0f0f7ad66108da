"""Make glibc keep freed memory for the next allocation.

By default it returns large blocks to the system and fetches them again in every layer; the page
faults then take half as long as an operator on a large map.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Make this process and its forks keep freed memory; return True with a glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
