"""A check of the memory that processes share, which workers need."""

from __future__ import annotations

import multiprocessing


def check_shared_memory(option: str) -> None:
    """Refuse workers where /dev/shm is missing, full or read-only.

    Args:
        option: What to type for a program without workers.

    Raises:
        ValueError: Names the folder and the option.
    """
    try:
        multiprocessing.Lock()  # a file there, as the batches of workers are
    except OSError as error:
        raise ValueError(
            f"worker processes need /dev/shm, which is missing, full or read-only "
            f"({error.strerror}); mount it (docker run --shm-size=1g), or pass {option}"
        ) from error
