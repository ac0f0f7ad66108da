"""metrics.csv: one row per logging step, whole after every flush, continued on resume."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class CsvLog(Logger):
    """Lightning's CSV logger deletes the file of the run it resumes; this one goes on writing it.

    Args:
        path: The file.
        flush_every: Rows between two writes.
    """

    def __init__(self, path: str | Path, flush_every: int = 50) -> None:
        super().__init__()
        self.path = Path(path)
        self.flush_every = flush_every
        self.rows: list[dict[str, Any]] = read_rows(self.path)

    @property
    def name(self) -> str:
        """No subfolder."""
        return ""

    @property
    def version(self) -> str:
        """No subfolder."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics of a step; those of one step share a row."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(metrics)
            return
        self.rows.append({"step": step, **metrics})
        if len(self.rows) % self.flush_every == 0:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""

    @rank_zero_only
    def save(self) -> None:
        """Write the file whole and put it in place."""
        if not self.rows:
            return
        columns = ["step", *sorted({key for row in self.rows for key in row} - {"step"})]
        temporary = self.path.with_suffix(".partial")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)
        temporary.replace(self.path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.csv, the empty cells left out; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return [row | {"step": int(row["step"])} for row in rows if "step" in row]
