"""Collect the results of a sweep's runs, and print their table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tools.comparing.averages import show_averages
from tools.comparing.run_records import read_run
from tools.comparing.side_by_side import DEFAULTS, show
from tools.comparing.table import setting


class SweepOutcomes(Callback):
    """Collect what the runs of a sweep return; Hydra itself drops it.

    A launcher may run a job in another process or on another machine. So each run leaves its
    outcome in a file beside the sweep's run folders.
    """

    latest: ClassVar[list[Mapping[str, Any]]] = []  # of this process's last sweep, in their order
    _files: ClassVar[tempfile.TemporaryDirectory[str] | None] = None

    def __init__(self) -> None:
        self.folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Create the folder of the outcomes; it is removed when this process ends."""
        root = Path(config.hydra.sweep.dir).absolute()
        root.mkdir(parents=True, exist_ok=True)
        SweepOutcomes._files = tempfile.TemporaryDirectory(prefix=".sweep-", dir=root)
        self.folder = Path(SweepOutcomes._files.name)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Write the outcome of a run, in the process of the run."""
        if self.folder is not None and job_return.status == JobStatus.COMPLETED:
            text = json.dumps(job_return.return_value)
            (self.folder / f"{config.hydra.job.num:06d}.json").write_text(text)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Read the outcomes of all runs."""
        assert self.folder is not None
        assert SweepOutcomes._files is not None
        files = sorted(self.folder.glob("*.json"))
        SweepOutcomes.latest = [json.loads(file.read_text()) for file in files]
        SweepOutcomes._files.cleanup()


def show_table(outcomes: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> None:
    """Print the table of a sweep's finished training runs, and averages of runs or tests.

    Args:
        outcomes: Results of the runs, with the run folder of each.
        swept: The settings that differ between the runs; they name the rows.
    """
    folders = [Path(outcome["folder"]) for outcome in outcomes if outcome["folder"]]
    runs = [read_run(folder) for folder in folders]
    finished = [run for run in runs if run.status == "finished"]
    if not finished:
        show_averages([run for run in runs if run.status == "evaluation" and run.metrics], swept)
        return
    by = [key for key in dict.fromkeys(swept) if key not in ("seed", "task", "backbone")]
    by = [key for key in by if any(setting(run, key)[1] is not None for run in finished)]
    several = len(by) == 1 and len({str(setting(run, by[0])[1]) for run in finished}) > 1
    axis = by[0] if several else ""  # of the plot
    options = {**DEFAULTS, "by": ",".join(["backbone", *by]), "plot": axis}
    print()
    show(folders, options)
    show_averages(finished, swept)
