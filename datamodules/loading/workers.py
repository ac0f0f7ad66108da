"""Loader processes that ignore a run's signals and end whenever the run ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

# Sent to all processes of a run by terminals, timeout, systemd, scancel or docker stop.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
JOBLIB_METHOD = "loky"  # start method within joblib's jobs, which pickles what a worker gets
PATIENCE = 3.0  # seconds for a worker to end by itself

_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


class Loader(DataLoader[Any]):
    """DataLoader with workers that ignore signals and end with their parent process."""

    def __iter__(self) -> Any:
        """Start the workers with signals blocked until they ignore them."""
        if self.num_workers == 0:
            return super().__iter__()
        if multiprocessing.get_start_method(allow_none=True) == JOBLIB_METHOD:
            self.multiprocessing_context = "fork"  # as in a run started from a shell
        before = set(multiprocessing.active_children())
        with _blocked_signals():
            iterator = super().__iter__()
        _started.update(set(multiprocessing.active_children()) - before)
        return iterator


def init_worker(worker: int = 0) -> None:
    """Ignore a run's signals in this process, and end it with its parent."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    end_with_parent()


def end_with_parent() -> None:
    """End this process with SIGKILL when its parent ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def end_workers() -> None:
    """End all workers of this process with SIGKILL, and wait for them."""
    workers = _alive()
    with _default_sigchld() if workers else contextlib.nullcontext():
        _kill(workers)
        for worker in workers:
            worker.join()


def end_slow_workers() -> None:
    """Kill the workers of this process that still run after a few seconds.

    torch waits five seconds per busy worker and then sends SIGTERM, which they ignore.
    """
    workers = _alive()
    if not workers:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error
    timer = threading.Timer(PATIENCE, _kill, [workers])
    timer.daemon = True
    timer.start()


# Registered later, so called earlier, than multiprocessing's wait for its children.
atexit.register(end_workers)


def _alive() -> list[BaseProcess]:
    children = set(multiprocessing.active_children())
    return [worker for worker in _started if worker in children]


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals of this thread; processes that it starts inherit the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _default_sigchld() -> Iterator[None]:
    """Disable torch's SIGCHLD handler, which raises an error when a worker is killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
