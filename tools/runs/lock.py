"""One training at a time in a run folder: a lock that names its holder and ends with its process.

``filelock`` guards the take-over. Its own lock lacks the holder's name and a sign of life, by which
a run on another machine is told from one that has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from tasks.engine.run_folder.atomic_writes import is_own_file
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_json
from tools.cli.processes import is_first_process

log_info = logging.getLogger(__name__).info

LOCK = "run.lock"
HEARTBEAT = 60.0  # seconds between two signs of life, for those who cannot see the process
SILENCE = 10 * HEARTBEAT  # after which a holder on another machine is taken for dead


@contextlib.contextmanager
def acquire(folder: Path, mode: str = "fit") -> Iterator[None]:
    """Acquire the lock of a run folder while its run trains.

    It is released after the block, or when the process ends. The first process of a run acquires it
    for all; an evaluation needs no lock.

    Raises:
        ValueError: Another run trains in the folder.
    """
    if mode != "fit" or not is_first_process():
        yield
        return
    path = folder / LOCK
    _take(path)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        content = _content(path)
        if content == _entry(content):
            path.unlink(missing_ok=True)


def refuse_if_held(folder: Path) -> None:
    """Check the lock before anything is prepared.

    Raises:
        ValueError: Another run trains in the folder.
    """
    path = folder / LOCK
    if os.path.lexists(path) and not is_own_file(path):
        raise ValueError(f"{path} is not a regular file; remove it")
    holder = _content(path)
    if path.exists() and not _is_stale(path, holder):
        raise ValueError(f"{folder} is in use by {_describe(holder)}; wait for its end or stop it")


def _take(path: Path) -> None:
    # A file that must not exist before is safe on network file systems. To judge a lock and to
    # replace it is not, so that one process at a time does it.
    guard = path.with_name(f".{path.name}.guard")
    with FileLock(guard):
        refuse_if_held(path.parent)
        if path.exists():
            log_info(
                f"Taking over {path.parent.name} from {_describe(_content(path))}, which is gone"
            )
            path.unlink(missing_ok=True)
        content = _entry({"since": datetime.now().astimezone().isoformat(timespec="seconds")})
        with path.open("x") as file:
            json.dump(content, file)
    guard.unlink(missing_ok=True)


def _entry(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content that this process writes; ``since`` is kept."""
    pid = os.getpid()
    me = {"host": platform.node(), "pid": pid, "born": _start(pid), "space": _space()}
    return {**me, "since": content.get("since")}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (FileNotFoundError, DamagedFile):
        return {}  # cut off while it was written; its age decides
    return content if isinstance(content, dict) else {}


def _is_stale(path: Path, holder: Mapping[str, Any]) -> bool:
    if holder.get("host") == platform.node() and holder.get("space") == _space():
        pid = holder.get("pid")
        # A process of the same number that began at another time is another one.
        return not isinstance(pid, int) or _start(pid) is None or _start(pid) != holder.get("born")
    try:
        return _now(path.parent) - path.stat().st_mtime > SILENCE
    except FileNotFoundError:
        return True


def _now(folder: Path) -> float:
    """Return the time of the file system's clock, as the machines' own may differ."""
    probe = folder / f".clock-{os.getpid()}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now


def _start(pid: int) -> int | None:
    """Return the start time of a process of this machine, or None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _alive(pid)
    state, *fields = text.rpartition(") ")[2].split()
    return None if state in "ZX" else int(fields[18])


def _alive(pid: int) -> int | None:
    """Return 0 for a running process, else None, on systems without /proc."""
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0


def _space() -> int | None:
    """Return the container (PID namespace) of this process."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(path)


def _describe(holder: Mapping[str, Any]) -> str:
    if not holder:
        return "an unknown process"
    pid, host, since = (str(holder.get(key)).split() for key in ("pid", "host", "since"))
    return f"process {' '.join(pid)} on {' '.join(host)}, training since {' '.join(since)}"
