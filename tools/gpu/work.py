"""One process of the checks: python -m tools.gpu.work PART DEVICE EXTENT FOLDER NAME ...

It prints a record per line. What is timed has the device for itself: eager forms before the other
processes start, compiled ones after these have ended. They are compiled beside the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import torch

from tools.gpu import numbers, speed, tasks
from tools.gpu.extent import EXTENTS, FAIL, Record, Setting, describe_error

EAGER = "eager "  # begins the names of what is timed before other processes start
TURN = "turn"  # file in the folder: locked alone by who times, together by all others


class Part(NamedTuple):
    """A kind of checks: the function for a name, and the names of each process."""

    check: Callable[[str, Setting], Iterator[Record]]
    groups: Callable[[Setting], list[list[str]]]
    is_timed: bool = False


def _split(names: list[str], processes: int = 3) -> list[list[str]]:
    """Deal names to processes."""
    return [names[start::processes] for start in range(min(processes, len(names)))]


PARTS = {
    "hosts": Part(speed.check_host, speed.host_groups, is_timed=True),
    "tokens": Part(speed.check_tokens, speed.token_groups, is_timed=True),
    "tasks": Part(tasks.check_task, tasks.task_groups),
    "kernels": Part(numbers.check_kernel, lambda s: _split(numbers.kernel_names(s))),
    "mixers": Part(numbers.check_mixer, lambda s: _split(numbers.mixer_names(s))),
}


def check_names(part: Part, names: list[str], setting: Setting, turn: IO[str]) -> Iterator[Record]:
    """Yield the records of all names; an error becomes the verdict on its name.

    A record with the name alone precedes each check, so that a crash of the process has a name.

    Args:
        part: Kind of the checks.
        names: To check.
        setting: Device, extent and folder.
        turn: The open file by which timed checks wait for each other.
    """
    if part.is_timed and not names[0].startswith(EAGER):
        fcntl.flock(turn, fcntl.LOCK_SH)
        signal.alarm(setting.extent.ready or 0)
        trial = dataclasses.replace(setting.extent, rounds=2, host_rounds=2)
        broken = set()
        for name in names:
            for record in _attempt(part, name, dataclasses.replace(setting, extent=trial)):
                # What lacks memory beside others may have enough alone.
                if record.get("error") not in (None, "OutOfMemoryError"):
                    broken.add(name)
                if name in broken or "verdict" not in record:
                    yield record
        names = [name for name in names if name not in broken]
        signal.alarm(0)
        fcntl.flock(turn, fcntl.LOCK_EX)
    for name in names:
        yield from _attempt(part, name, setting)


def _attempt(part: Part, name: str, setting: Setting) -> Iterator[Record]:
    """Yield the name, then its records or that of the error that it raises."""
    yield {"name": name}
    try:
        for record in part.check(name, setting):
            yield {"name": name, **record}
    except Exception as error:
        note = describe_error(error)
        yield {"name": name, "verdict": FAIL, "note": note, "error": type(error).__name__}
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.synchronize()  # raises after a fault that breaks the device for this process
        torch.cuda.empty_cache()  # for the processes beside this one


def main(part: str, device: str, extent: str, folder: str, *names: str) -> int:
    """Print the records of this process and return its exit status."""
    setting = Setting(device, EXTENTS[extent], Path(folder))
    lines, sys.stdout = sys.stdout, sys.stderr  # libraries print to stderr
    with (setting.folder / TURN).open("w") as turn, contextlib.closing(lines):
        for record in check_names(PARTS[part], list(names), setting, turn):
            print(json.dumps({"part": part, **record}), file=lines, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
