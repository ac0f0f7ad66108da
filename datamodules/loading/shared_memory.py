"""Check of /dev/shm, which worker processes need."""

from __future__ import annotations

import multiprocessing


def check_shared_memory(option: str) -> None:
    """Raise an error where /dev/shm is missing, full or read-only.

    Args:
        option: Option that runs the program without workers.

    Raises:
        ValueError: Workers cannot start; the message names the folder and the option.
    """
    try:
        multiprocessing.Lock()  # creates a file there, as batches of workers do
    except OSError as error:
        raise ValueError(
            f"worker processes need /dev/shm, which is missing, full or read-only "
            f"({error.strerror}); mount it (docker run --shm-size=1g), or pass {option}"
        ) from error
