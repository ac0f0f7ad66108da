"""The runs of a comparison that have ended: rows of runs.csv, written whole after each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.engine.run_folder.atomic_writes import write_whole
from tools.comparison.csv_rows import csv_text, read_models

RUNS = "runs.csv"
Stage = Literal["tune", "final", "untuned", "repeat"]
Key = tuple[str, str, str, str, int, float]


class Run(BaseModel):
    """A run of a comparison.

    Attributes:
        stage: "tune" for one that chooses the rate on held-out training samples, "untuned" for one
            with the recipe's rate where another one was chosen, "repeat" for a published run again.
        mixer: Label of the mixer.
        host: Label of the host.
        data: Label of the data set.
        seed: Its seed.
        factor: Of the recipe's learning rate.
        status: "finished" or "failed".
        value: The primary metric.
        ece: Expected calibration error; NaN where the family lacks it.
        memory: Peak memory in MiB.
        seconds: Of the whole command.
        folder: Its run folder.
        reused: True for a run that was made before the comparison.
        reason: Why it failed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Stage
    mixer: str
    host: str
    data: str
    seed: int
    factor: float
    status: Literal["planned", "finished", "failed"] = "planned"
    value: float = math.nan
    ece: float = math.nan
    memory: float = math.nan
    seconds: float = math.nan
    folder: str = ""
    reused: bool = False
    reason: str = ""

    @property
    def key(self) -> Key:
        """Return what identifies the run in its comparison."""
        return self.stage, self.mixer, self.host, self.data, self.seed, self.factor

    @property
    def cell(self) -> tuple[str, str]:
        """Return host and data set."""
        return self.host, self.data

    def __str__(self) -> str:
        """Name the run in one line."""
        parts = [self.mixer, f"in {self.host} on {self.data}, seed {self.seed}"]
        parts += [f"rate x {self.factor:g}"] if self.stage == "tune" or self.factor != 1 else []
        return ("" if self.stage == "final" else f"{self.stage} ") + ", ".join(
            [" ".join(parts[:2]), *parts[2:]]
        )


class Journal:
    """Rows of runs.csv by run.

    Args:
        folder: Folder of the comparison.

    Raises:
        DamagedFile: The file has other rows.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUNS
        self.runs = {run.key: run for run in _read(self.path)}

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs.values())

    def add(self, run: Run) -> None:
        """Add or replace a run, and write the file."""
        self.runs[run.key] = run
        self.write()

    def relabel(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Give hosts and data sets other labels: by ``host`` and ``data``, the new of each old."""
        pairs = [
            (run, {axis: names.get(getattr(run, axis)) for axis, names in labels.items()})
            for run in self
        ]
        runs = [
            run.model_copy(update={axis: name for axis, name in names.items() if name})
            for run, names in pairs
        ]
        if runs != [*self]:
            self.runs = {run.key: run for run in runs}
            self.write()

    def write(self) -> None:
        """Write all rows to the file."""
        rows = (
            row.model_dump() | {"folder": self._relative_path(row.folder)}
            for row in self.runs.values()
        )
        write_whole(self.path, csv_text(list(Run.model_fields), rows))

    def _relative_path(self, folder: str) -> str:
        """Return a run folder as the file has it: from the comparison's, which may be moved."""
        base, path = self.path.parent.resolve(), Path(folder).resolve()
        return str(path.relative_to(base)) if folder and path.is_relative_to(base) else folder

    def finished(self, stage: Stage = "final") -> list[Run]:
        """Return the runs of a stage that have a value."""
        return [run for run in self if run.stage == stage and run.status == "finished"]

    def completed(self, run: Run) -> Run | None:
        """Return the finished run of the same key, or None."""
        known_run = self.runs.get(run.key)
        return known_run if known_run is not None and known_run.status == "finished" else None


def _read(path: Path) -> Iterator[Run]:
    if path.exists():
        for run in read_models(path, Run):
            # An absolute folder stays one.
            yield run.model_copy(
                update={"folder": str(path.parent / run.folder) if run.folder else ""}
            )
