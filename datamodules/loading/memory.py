"""How much memory the machine has, and what is larger than that."""

from __future__ import annotations

import functools
from pathlib import Path

import psutil

# Limits of a container's or job's memory in bytes, or the word max: control groups 2 and 1.
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
FLOAT = 4  # bytes


@functools.cache
def machine_memory() -> int:
    """Return the bytes of memory that processes may take here, all together."""
    limits = [psutil.virtual_memory().total]
    for file in LIMITS:
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def refuse_larger(what: str, size: int, remedy: str) -> None:
    """Raise an error if something is larger than the machine's memory.

    Args:
        what: It, in messages.
        size: Its bytes.
        remedy: What to type instead.

    Raises:
        ValueError: It is larger.
    """
    memory = machine_memory()
    if size > memory:
        raise ValueError(
            f"{what} takes {in_bytes(size)}, and this machine has {in_bytes(memory)} of memory; "
            f"{remedy}"
        )


def in_bytes(size: float) -> str:
    """Return a number of bytes with a unit: 3.2 GB."""
    size = min(size, 1e300)  # larger whole numbers are not divided
    for unit in ("bytes", "KB", "MB", "GB", "TB", "PB"):
        if size < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if size >= 100 or unit == "bytes" else f"{size:.1f} {unit}"
