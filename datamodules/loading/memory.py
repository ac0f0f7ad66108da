"""Checks of the machine's memory and of /dev/shm, which worker processes need."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import shutil
from pathlib import Path

import psutil

# Memory limits of a container or job in bytes, or the word max: control groups 2 and 1.
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
FLOAT = 4  # bytes
SHARED = Path("/dev/shm")
LEAST_SHARED = 2**20  # bytes; less than a batch of images takes


@functools.cache
def machine_memory() -> int:
    """Return the bytes of memory available to all processes together."""
    limits = [psutil.virtual_memory().total]
    for file in LIMITS:
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def check_fits_memory(label: str, size: int, remedy: str) -> None:
    """Raise an error if something is larger than the machine's memory.

    Args:
        label: Name of it in messages.
        size: Its size in bytes.
        remedy: Advice at the end of the message.

    Raises:
        ValueError: It is larger than the memory.
    """
    memory = machine_memory()
    if size > memory:
        raise ValueError(
            f"{label} takes {format_bytes(size)}, but this machine has {format_bytes(memory)} of "
            f"memory; {remedy}"
        )


def check_images_fit(count: int, size: tuple[int, int], remedy: str, option: str = "") -> None:
    """Raise an error if a batch of images (3, H, W) is larger than the machine's memory.

    Args:
        count: Number of images.
        size: Height and width of the largest.
        remedy: Advice at the end of the message.
        option: Option that gives the number of images, for the message.

    Raises:
        ValueError: It is larger than the memory; the message names its size.
    """
    height, width = size
    description = f"a batch of {count:,} images of {height:,}x{width:,} pixels"
    title = f"{description} ({option})" if option else description
    check_fits_memory(title, count * 3 * height * width * FLOAT, remedy)


def format_bytes(size: float) -> str:
    """Return a number of bytes with a unit: 3.2 GB."""
    size = min(size, 1e300)  # larger integers overflow in a division
    for unit in ("bytes", "KB", "MB", "GB", "TB", "PB"):
        if size < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if size >= 100 or unit == "bytes" else f"{size:.1f} {unit}"


def check_shared_memory(option: str) -> None:
    """Raise an error where /dev/shm is missing, full, too small or read-only.

    Args:
        option: Option that runs the program without workers.

    Raises:
        ValueError: Workers cannot start; the message names the folder and the option.
    """
    try:
        multiprocessing.Lock()  # creates a file there, as batches of workers do
        if SHARED.is_dir() and shutil.disk_usage(SHARED).free < LEAST_SHARED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ValueError(
            f"worker processes need /dev/shm, which is missing, full, too small or read-only "
            f"({error.strerror}); mount or enlarge it (docker run --shm-size=1g), or pass {option}"
        ) from error
