"""End all processes of a run together, whichever ends first."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.engine.loops.signals import STATUSES, STOP, RunStopped
from tools.cli.processes import FIRST_PROCESS, end_with_parent, find_launcher, is_child_process
from tools.runs.folder import ENVIRONMENT
from tools.runs.nodes import NODES
from tools.runs.outcome import record_failure

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

POLL = 1.0  # seconds between two looks at the other processes
GRACE = 20.0  # seconds in which the first process may notice by itself that another one has ended
FOLLOWED = 3.0  # the same for the others, and the end of the first one
REFUSED = 2  # status of a process that has printed why it ends

FIRST_IS_GONE = (
    "the first process of this run was killed, so the others stop; the cause is often a lack of "
    "memory. To continue from the last checkpoint, add resume=true to the command"
)


@contextlib.contextmanager
def processes(trainer: Trainer) -> Iterator[None]:
    """End the processes, process group and environment of a run with it, however it ends.

    Lightning starts the other processes of a run and leaves them and its environment variables to
    the end of this process, where a sweep's next run would use them.

    Raises:
        ValueError: Another process was killed or has failed without a message.
        SystemExit: Another process has printed why; or this is not the first process.
    """
    before, parent = dict(os.environ), first_process()
    if not _belongs_to_parent(trainer):
        os.environ[FIRST_PROCESS] = str(os.getpid())
    launcher = trainer.strategy.launcher
    children: list[subprocess.Popen[bytes]] = []
    try:
        with _watched(trainer):
            yield
    except BaseException as error:
        children = getattr(launcher, "procs", [])
        lost = _is_lost(error)
        statuses = [_status(process) for process in children] if lost else []
        for process in children:
            process.kill()  # they wait for this one
        if not lost:
            raise
        raise _cause(trainer, parent, statuses) from error
    else:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    finally:
        from datamodules.loading.workers import end_workers

        children.clear()
        STOP.others = ()
        end_workers()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def _is_lost(error: BaseException) -> bool:
    """Return True if an error means a lost connection to another process."""
    text = str(error)
    if "in use" in text.lower() or "EADDRINUSE" in text:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in text


def _cause(trainer: Trainer, parent: int, statuses: list[int | None]) -> BaseException:
    """Return the exception for a lost connection to another process."""
    if not trainer.is_global_zero:
        if _belongs_to_parent(trainer) and _orphaned(parent):
            return ValueError(FIRST_IS_GONE)
        return SystemExit(1)  # the first process says what there is to say
    signum = _stopped_by(statuses)
    if signum is not None:
        return RunStopped(signum)
    return SystemExit(REFUSED) if REFUSED in statuses else ValueError(_ended(statuses))


def _ended(statuses: list[int | None]) -> str:
    if not statuses:  # started by torchrun or srun
        return NODES.problem or "another process of this run has ended; its error is printed above"
    return (
        f"the other processes of this run ended with status {statuses}; their error "
        "is printed above, and -9 often means too little memory"
    )


def _status(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    return process.returncode


def _belongs_to_parent(trainer: Trainer) -> bool:
    """Return True if the first process of this machine started this one."""
    return trainer.local_rank > 0 and find_launcher() is None


def _orphaned(parent: int) -> bool:
    # The connection may break some time before the system gives a process its new parent.
    until = time.monotonic() + 2 * POLL
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.05)
    return os.getppid() != parent


def first_process() -> int:
    """Return the id of the process that started this one."""
    return int(os.environ.get(FIRST_PROCESS, os.getppid()))


@contextlib.contextmanager
def following_first_process() -> Iterator[None]:
    """End a process that Lightning has started with the first one, from its beginning on."""
    if not is_child_process():
        yield
        return
    first = first_process()
    end_with_parent(None)  # from here on with a message
    if os.getppid() != first:
        raise ValueError(FIRST_IS_GONE)
    folder = Path(os.environ.get(ENVIRONMENT, os.devnull))
    with _watching(lambda: FIRST_IS_GONE if os.getppid() != first else None, folder, FOLLOWED):
        yield


@contextlib.contextmanager
def _watched(trainer: Trainer) -> Iterator[None]:
    """Watch the processes that Lightning starts."""
    from tasks.engine.loops.lightning_private import watching_processes

    folder, watching = Path(trainer.default_root_dir), contextlib.ExitStack()

    def watch_others(children: list[subprocess.Popen[bytes]]) -> None:
        STOP.others = children
        watching.enter_context(_watching(partial(_failed, children), folder, GRACE))

    with watching, watching_processes(watch_others):
        yield


@contextlib.contextmanager
def _watching(gone: Callable[[], str | None], folder: Path, grace: float) -> Iterator[None]:
    ended = threading.Event()
    arguments = (gone, ended, folder, grace)
    threading.Thread(target=_watch, args=arguments, name="watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _stopped_by(statuses: Sequence[int | None]) -> int | None:
    """Return the signal that ended all failed processes."""
    failed = {STATUSES.get(status) for status in statuses if status}
    return failed.pop() if len(failed) == 1 else None


def _failed(children: list[subprocess.Popen[bytes]]) -> str | None:
    """Return the message for a failed process; empty if that process has printed one.

    A signal that has ended another process ends this one, too.
    """
    statuses = [process.poll() for process in children]
    if not any(statuses):
        return None
    signum = _stopped_by(statuses)
    if signum is None:
        return "" if REFUSED in statuses else _ended(statuses)
    if STOP.signum is None:
        os.kill(os.getpid(), signum)
    return None


def _watch(
    gone: Callable[[], str | None], ended: threading.Event, folder: Path, grace: float
) -> None:
    """End this process if it waits in uninterruptible code for one that is gone."""
    while (text := gone()) is None:
        if ended.wait(POLL):
            return
    if ended.wait(grace):
        return
    if text:
        record_failure(folder, text)
        logging.shutdown()
        print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(REFUSED)
