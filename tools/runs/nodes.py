"""Processes that torchrun or srun started: one run folder, and an end for all when one fails.

They meet in the store of their launcher before the run reads anything. There each counts on, and
the first one to fail leaves its message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from tasks.engine.loops.signals import STOP, RunStopped
from tools.cli.errors import user_message
from tools.cli.processes import find_launcher
from tools.runs.outcome import record_failure

POLL = 2.0  # seconds between two looks at the store
SILENT = 120.0  # seconds after which a process that stopped counting has ended
GRACE = 20.0  # seconds in which a process may end by itself when another one has failed
START = timedelta(minutes=10)  # in which the processes of all nodes must meet
FAILED = 2  # exit status
PROBLEM = "problem"  # key of the first message


class Nodes:
    """Processes of a launcher, on one or several nodes; without a launcher it does nothing.

    Attributes:
        rank: Rank of this process.
        count: Number of processes.
        folder: Run folder of the first process, once it is shared.
    """

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        self.folder: Path | None = None
        self._store: Any = None
        self._ended = threading.Event()
        self._runs = 0

    @property
    def problem(self) -> str:
        """Message of the first process that failed; empty without one."""
        with contextlib.suppress(RuntimeError):  # the first process has closed the store
            if self._store is not None and self._store.check([PROBLEM]):
                return str(self._store.get(PROBLEM).decode())
        return ""

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """End all processes when one fails, from the beginning of a run on.

        Raises:
            ValueError: Some processes did not start.
        """
        launcher = find_launcher()
        if launcher is None or launcher[1] == 1:
            yield
            return
        self._connect(*launcher)
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            yield
            self._store.set(f"over {self.rank}", "")
        except BaseException as error:
            # Other exits are agreed on, and the first process has their message.
            if self.rank == 0 or isinstance(error, Exception | RunStopped):
                text = user_message(error) or str(error) or type(error).__name__
                host = socket.gethostname()
                self._report(
                    self._store, f"process {self.rank} of the run, on {host}, ended: {text}"
                )
            raise
        finally:
            self._ended.set()
            self._store = None

    def share(self, name: str, folder: Path | None) -> Path | None:
        """Return a folder of the first process, or None without one.

        Args:
            name: Meaning of the folder, the same in all processes.
            folder: The folder in the first process.

        Raises:
            ValueError: This node does not see that folder.
        """
        if self._store is None:
            return folder
        if self.rank == 0:
            self._store.set(name, str(folder or ""))
        else:
            self._store.wait([name], START)
            text = self._store.get(name).decode()
            folder = Path(text) if text else None
        if folder is not None and not folder.is_dir():
            raise ValueError(
                f"{folder}, the run folder of the first process, is missing on "
                f"{socket.gethostname()}; pass an output_dir on a disk that all nodes share"
            )
        self.folder = folder
        return folder

    def _connect(self, launcher: str, count: int) -> None:
        from torch.distributed import DistError
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        url = "env://"
        if launcher != "torchrun":
            from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

            job = SLURMEnvironment()
            address = f"{job.main_address}:{job.main_port}"
            url = f"tcp://{address}?rank={job.global_rank()}&world_size={count}"
        try:
            store, self.rank, self.count = next(iter(rendezvous(url, timeout=START)))
        except DistError as error:
            raise ValueError(
                f"the {count} processes that {launcher} was to start did not meet within "
                f"{START.total_seconds() / 60:.0f} minutes; another node's error says why"
            ) from error
        self._runs += 1  # of a sweep
        self._store, self._ended = PrefixStore(f"run {self._runs}", store), threading.Event()

    @staticmethod
    def _report(store: Any, text: str) -> None:
        """Leave a message of failure, unless there is one."""
        with contextlib.suppress(RuntimeError):  # the first process has closed the store
            store.compare_set(PROBLEM, "", text)

    def _watch(self) -> None:
        """Count on, and end this process if another one has failed."""
        store, ranks = self._store, range(1, self.count if self.rank == 0 else 1)
        counts = dict.fromkeys(ranks, (0, time.monotonic()))
        while not self._ended.wait(POLL):
            try:
                store.add(f"alive {self.rank}", 1)
                for rank, (count, since) in counts.items():
                    now = store.add(f"alive {rank}", 0)
                    if now != count:
                        counts[rank] = now, time.monotonic()
                    elif time.monotonic() - since > SILENT and not store.check([f"over {rank}"]):
                        text = f"process {rank} of the run has ended without a message"
                        self._report(store, text)
                text = store.get(PROBLEM).decode() if store.check([PROBLEM]) else ""
            except RuntimeError:
                text = "the first process of the run has ended"
            # All stop together on a signal, and some have more to write than others.
            if text and STOP.signum is None and not self._ended.wait(GRACE):
                self._end(text)

    def _end(self, text: str) -> None:
        if self.rank == 0:
            if self.folder is not None:
                record_failure(self.folder, text)
            logging.shutdown()
            print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(FAILED)


NODES = Nodes()
