"""Runs side by side, in forked processes that have imported what a run needs, or on a cluster."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.cli.grammar import key_of, parse
from tools.cli.paths import ROOT
from tools.comparison.plan import Plan
from tools.config.hydra_options import LAUNCHER

PACKAGES = {"backbones", "heads", "tasks", "datamodules", "tools"}
# The imports of a run take longer than a hundred steps of a small network. Only a process without
# threads of torch or CUDA may be forked, which multiprocessing's server is.
SERVER = multiprocessing.get_context("forkserver")
# Options that submitit takes for all clusters, and when it is made; others begin with a cluster.
OF_ALL_CLUSTERS = {"timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb",
                   "nodes", "name", "stderr_to_stdout"}  # fmt: skip
RETRIES = ("max_num_timeout",)
MINUTES = 60  # of a job, Hydra's default
SECONDS = 1.0  # between two looks at the queue


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


def make_workers(plan: Plan) -> Workers | ClusterWorkers:
    """Return what does the runs of a plan, by its launcher."""
    options: dict[str, Any] = {
        key_of(word).removeprefix("hydra.launcher."): parse(word).value() for word in plan.launcher
    }
    name = str(options.pop(LAUNCHER, ""))
    if name.startswith("submitit_"):
        cluster = name.removeprefix("submitit_")
        return ClusterWorkers(plan.jobs, cluster, options, plan.folder / "submitit")
    return Workers(plan.jobs)


class ClusterWorkers:
    """Up to ``jobs`` commands in the queue of a cluster, by submitit.

    Args:
        jobs: Commands at a time, waiting or running.
        cluster: "slurm", or "local" for processes of this machine.
        options: Of submitit's launcher in Hydra, such as partition and timeout_min.
        folder: Of submitit's own files.
    """

    def __init__(self, jobs: int, cluster: str, options: Mapping[str, Any], folder: Path) -> None:
        import submitit

        self.jobs = jobs
        self.processes: dict[Any, Callable[[int], Any]] = {}
        repeats = {f"{cluster}_{key}": options[key] for key in RETRIES if key in options}
        self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **repeats)
        self.executor.update_parameters(
            **{
                key if key in OF_ALL_CLUSTERS else f"{cluster}_{key}": value
                for key, value in ({"timeout_min": MINUTES} | dict(options)).items()
                if key not in RETRIES
            }
        )

    def start(self, words: Sequence[str], log: Path, result: Callable[[int], Any]) -> None:
        """Submit a command; its output goes to a file, its exit status to a function."""
        job = self.executor.submit(exit_status, list(words), log.resolve())
        self.processes[job] = result

    def results(self, most: int) -> Iterator[Any]:
        """Wait until at most some commands are left, and yield the results of those that ended."""
        while len(self.processes) > most:
            time.sleep(SECONDS)
            for job in [job for job in self.processes if job.done()]:
                status = -signal.SIGTERM if job.exception() else job.result()
                yield self.processes.pop(job)(status)

    def stop(self) -> None:
        """End all commands; run.py saves a checkpoint."""
        for job in self.processes:
            job.cancel(check=False)


def exit_status(words: Sequence[str], log: Path) -> int:
    """Do what ``python tools/run.py`` does, and return its exit status."""
    outputs = {number: os.dup(number) for number in (1, 2)}  # where submitit writes on
    try:
        _run(list(words), log, None)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        for number, output in outputs.items():
            os.dup2(output, number)
    return 0


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
