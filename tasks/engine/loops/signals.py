"""SIGINT, SIGTERM, SIGHUP and SIGUSR1: a training saves and ends, anything else ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STATUSES = {128 + signum: signum for signum in SIGNALS} | {-signum: signum for signum in SIGNALS}
# Seconds within which a second signal is the first one once more: timeout sends SIGTERM to its
# command and to the group of it.
ONCE = 1.0
HANG = 2.0  # seconds after a signal in which a batch may still arrive
END = b"\0"
STEP = 30.0  # seconds that a step may last after a signal, in one of several processes
STEPS = 5  # and how many times as long as the longest one so far
GRACE = 5.0  # seconds in which the handler of a signal that stops at once has to be called
CLEANING = 60.0  # seconds that the run then has to end


class RunStopped(SystemExit):
    """A signal ends the run; the exit status is the one that shells give to it.

    Attributes:
        signum: The signal.
        waiting: True if it ends a wait for data, between two batches.
    """

    def __init__(self, signum: int, *, waiting: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum, self.waiting = signum, waiting


class Stop:
    """Handler of this process's signals.

    Attributes:
        others: The other processes of the run that this one has started.
        signum: The signal that came first, or None.
        finishing: True while training, which looks at ``signum`` after each step. At other times,
            on a second signal, and in a wait for data, ``RunStopped`` is raised.
        joined: True while training together with other processes.
    """

    def __init__(self) -> None:
        self.others: Sequence[subprocess.Popen[bytes]] = ()
        self.signum: int | None = None
        self.finishing = self.joined = False
        self._since, self._raised, self._waits = 0.0, False, False
        self._step_began: float | None = None
        self._longest_step = 0.0
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    @property
    def handled(self) -> set[int]:
        """The signals that this object handles."""
        return set(self._before)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; in a thread, where Python cannot, leave them as they are."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            yield
            return
        self.signum, self.finishing, self._raised = None, False, False
        self._ended = threading.Event()
        alarm = signal.signal(signal.SIGALRM, self._stop_waiting)
        for signum in SIGNALS:
            before = signal.getsignal(signum)
            # nohup has a run ignore that its terminal is gone.
            if signum != signal.SIGHUP or before != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._handle)
        try:
            with self._watched():
                yield
        finally:
            for number in list(self._before):
                self.release(number)
            signal.signal(signal.SIGALRM, alarm)
            self.signum, self.finishing, self.joined = None, False, False

    def release(self, signum: int | None) -> None:
        """Restore the previous handler of a signal."""
        if signum in self._before:
            signal.signal(signum, self._before.pop(signum))

    def raise_if_signalled(self) -> None:
        """Raise ``RunStopped`` again where a library has swallowed it."""
        if self.signum is not None and not self.finishing:
            raise RunStopped(self.signum)

    def begin_wait(self) -> None:
        """Begin to wait for data; ``RunStopped`` ends a wait that outlasts a signal by ``HANG``."""
        self._waits = True
        self._limit_wait()

    def end_wait(self) -> None:
        """End a wait for data."""
        self._waits = False
        if self.signum is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def begin_step(self) -> None:
        """Begin a training step, in which other processes are waited for.

        Where one does not come, a signal ends this process after ``STEP`` seconds.
        """
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        """End a training step."""
        if self._step_began is not None:
            self._longest_step = max(self._longest_step, time.monotonic() - self._step_began)
        self._step_began = None

    def _limit_step(self, signum: int) -> None:
        began = self._step_began
        limit = time.monotonic() + max(STEP, STEPS * self._longest_step)
        while began is not None and began == self._step_began:
            if self._ended.wait(STEP / 100):
                return
            if time.monotonic() > limit:
                print(
                    "stopped within a step that waits for another process; resume=true continues "
                    "from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                self._exit(signum)

    def _exit(self, signum: int) -> None:
        """End this process and those that it has started."""
        for process in self.others:
            process.kill()
        os._exit(128 + signum)

    def _limit_wait(self) -> None:
        if self.signum is not None and self._waits:
            signal.setitimer(signal.ITIMER_REAL, HANG)

    def _stop_waiting(self, signum: int, frame: Any) -> None:
        if self._waits and self.signum is not None:
            self._raised = True
            raise RunStopped(self.signum, waiting=True)

    def _handle(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._since = signum, now
            if self.finishing:
                self._limit_wait()
                return
        elif now - self._since < ONCE:
            return
        self._raised = True
        raise RunStopped(signum)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """End this process if it must end at once, but waits in code that cannot be interrupted.

        Python calls handlers between two of its own instructions only; the descriptor is written to
        when the signal arrives.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watch = threading.Thread(target=self._watch, args=(reading,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._ended.set()
            signal.set_wakeup_fd(before)
            os.write(writing, END)  # forked workers keep the pipe open
            watch.join()
            os.close(writing)
            os.close(reading)

    def _watch(self, reading: int) -> None:
        first: float | None = None
        while (received := os.read(reading, 1)) != END:
            signum, now = received[0], time.monotonic()
            if signum == signal.SIGALRM and self.signum is not None and self._waits:
                signum = self.signum
            elif signum not in self._before:
                continue
            else:
                first = now if first is None else first
                if self.finishing and now - first < ONCE:
                    if self.joined:
                        limit = partial(self._limit_step, signum)
                        threading.Thread(target=limit, daemon=True).start()
                    continue
            if self._ended.wait(GRACE) or (self._raised and self._ended.wait(CLEANING)):
                return
            self._exit(signum)


STOP = Stop()
