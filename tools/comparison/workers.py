"""Runs side by side, in processes forked from one that has imported what a run needs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.cli.paths import ROOT

PACKAGES = {"backbones", "heads", "tasks", "datamodules", "tools"}
# The imports of a run take longer than a hundred steps of a small network. Only a process without
# threads of torch or CUDA may be forked, which multiprocessing's server is.
SERVER = multiprocessing.get_context("forkserver")


class Workers:
    """Up to ``jobs`` processes, each with a command of run.py.

    Args:
        jobs: Processes at a time.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.processes: dict[BaseProcess, Callable[[int], Any]] = {}
        names = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
        SERVER.set_forkserver_preload(["tools.comparison.preloads", *sorted(names)])
        folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))

    def start(self, words: Sequence[str], log: Path, result: Callable[[int], Any]) -> None:
        """Start a command; its output goes to a file, its exit status to a function."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs) if self.jobs > 1 else None
        process = SERVER.Process(target=_run, args=(list(words), log, threads))
        process.start()
        self.processes[process] = result

    def results(self, most: int) -> Iterator[Any]:
        """Wait until at most some processes are left, and yield the results of those that ended."""
        while len(self.processes) > most:
            wait([process.sentinel for process in self.processes])
            for process in [p for p in self.processes if not p.is_alive()]:
                process.join()
                yield self.processes.pop(process)(process.exitcode or 0)

    def stop(self) -> None:
        """End all commands; run.py saves a checkpoint."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _run(words: list[str], log: Path, threads: int | None) -> None:
    """Do what ``python tools/run.py`` does, in this process."""
    multiprocessing.set_start_method(None, force=True)  # loaders start processes as everywhere
    sys.argv = [str(ROOT / "tools" / "run.py"), *words]
    with log.open("w") as file:
        file.write(f"$ {shlex.join([sys.executable, *sys.argv])}\n")
        file.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does."""

    def end(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
