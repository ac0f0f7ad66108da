"""Run the processes of the checks side by side, and keep the records of those that fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.cli.paths import ROOT
from tools.gpu.extent import FAIL, Extent, Record, Setting
from tools.gpu.work import EAGER, PARTS, TURN

PAUSE = 0.2  # seconds between two looks at the processes


@dataclass
class Worker:
    """A process of the checks.

    Attributes:
        part: Kind of its checks.
        names: What it checks.
        command: To start it; the names follow.
        is_timed: True if it waits for its turn by itself, and so starts before others end.
        log: File of its errors; its records are beside it.
        process: When it has started.
    """

    part: str
    names: list[str]
    command: list[str]
    is_timed: bool
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def is_alone(self) -> bool:
        """True if the device is its own from the start."""
        return self.is_timed and self.names[0].startswith(EAGER)

    def start(self, folder: Path) -> None:
        """Start the process in a group of its own, which a signal to this one does not reach."""
        number = len(list(folder.glob("*.log")))
        self.log = folder / f"{number:02d}_{self.part}.log"
        with self.log.open("wb") as log, self.log.with_suffix(".jsonl").open("wb") as records:
            self.process = subprocess.Popen(
                [*self.command, *self.names],
                stdout=records, stderr=log, stdin=subprocess.DEVNULL,
                cwd=ROOT, start_new_session=True,
                # Torch before 2.13 would serve what it compiled in bfloat16 as float16.
                env={**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"},
            )  # fmt: skip

    def stop(self) -> None:
        """End the process and those that it has started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def lines(self) -> list[Record]:
        """Return what the process has printed: names that it begins with, and records."""
        text = self.log.with_suffix(".jsonl").read_text() if self.process else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def read(self) -> tuple[list[Record], list[str]]:
        """Return the records so far, and the names without one, a check that began first."""
        lines = self.lines()
        records = [line for line in lines if "verdict" in line]
        checked = {record["name"] for record in records}
        begun = [line["name"] for line in lines if "verdict" not in line][-1:]
        return records, [job for job in dict.fromkeys([*begun, *self.names]) if job not in checked]

    def failure(self) -> str:
        """Return why the process has ended."""
        status = self.process.returncode if self.process else 0
        if status == -signal.SIGALRM:
            return "not ready in time"
        last = (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        return f"process ended with status {status}: {last}"


def plan(setting: Setting, extent: str, parts: Iterable[str]) -> list[Worker]:
    """Return the processes of the chosen parts."""
    command = [sys.executable, "-m", "tools.gpu.work"]
    return [
        Worker(part, names, [*command, part, setting.device, extent, str(setting.folder)],
               PARTS[part].is_timed)
        for part in parts for names in PARTS[part].groups(setting)
    ]  # fmt: skip


def run_workers(
    workers: list[Worker], folder: Path, extent: Extent, keep: Callable[[list[Record]], None]
) -> list[Record]:
    """Run processes and return all records; an interrupt or the limit keeps what there is.

    Args:
        workers: Those alone run first, one by one; then all timed ones start, and ``extent.jobs``
            of the others side by side.
        folder: For logs.
        extent: States jobs and the limit.
        keep: Called with all records whenever a process has ended.
    """
    waiting, running, ended = list(workers), list[Worker](), list[Record]()
    deadline = time.monotonic() + (extent.seconds or float("inf"))
    why = "not reached: interrupted"
    with (folder / TURN).open("w") as turn, contextlib.suppress(KeyboardInterrupt):
        fcntl.flock(turn, fcntl.LOCK_SH)
        while waiting or running:
            if time.monotonic() > deadline:
                why = f"not reached in {extent.seconds:.0f} s"
                break
            for worker in list(waiting):
                if _may_start(worker, waiting, running, extent.jobs):
                    worker.start(folder)
                    waiting.remove(worker)
                    running.append(worker)
            for worker in [
                job for job in running if job.process and job.process.poll() is not None
            ]:
                running.remove(worker)
                records, more = _close(worker)
                ended += records
                waiting += more
                keep(ended)
            if all(worker.is_timed for worker in [*waiting, *running]):
                fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(PAUSE)
    for worker in [*running, *waiting]:
        worker.stop()
        records, missing = worker.read()
        ended += [*records, *_failures(worker.part, missing, why)]
    keep(ended)
    return ended


def _may_start(worker: Worker, waiting: list[Worker], running: list[Worker], jobs: int) -> bool:
    """Return True if a waiting process may start beside those that run."""
    if worker.is_alone:
        return not running
    if any(job.is_alone for job in [*waiting, *running]):
        return False
    return worker.is_timed or sum(not job.is_timed for job in running) < jobs


def _close(worker: Worker) -> tuple[list[Record], list[Worker]]:
    """Return the records of an ended process, and another one for what it has not reached."""
    records, missing = worker.read()
    assert worker.process
    if not missing:
        return records, []
    last = worker.lines()[-1:]
    if worker.process.returncode == -signal.SIGALRM or not last:
        lost = missing  # another process would take as long, or end before it begins
    else:  # the last check ended the process, unless its own record has said so
        lost = missing[:1] if "verdict" not in last[0] else []
    records += _failures(worker.part, lost, worker.failure())
    rest = [name for name in missing if name not in lost]
    return records, [replace(worker, names=rest, process=None)] if rest else []


def _failures(part: str, names: list[str], note: str) -> Iterator[Record]:
    return ({"part": part, "name": name, "verdict": FAIL, "note": note} for name in names)
