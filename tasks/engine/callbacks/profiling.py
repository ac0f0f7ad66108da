"""Profile a training; its table is printed at the end and saved."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from torch.profiler import ProfilerActivity, profile, schedule

from tasks.engine.run_folder.atomic_writes import write_whole

log_info = rank_zero_only(logging.getLogger(__name__).info)

PROFILE, TRACE = "profile.txt", "trace.json"
SHOWN_LINES = 24
WIDTH = 60  # of an action's name


class Unprofiled(PassThroughProfiler):
    """Profiler without measurements and without cost; a step calls it a hundred times."""

    def __init__(self) -> None:
        super().__init__()
        self._nothing = contextlib.nullcontext("")

    def profile(self, action_name: str) -> Any:
        """Return an empty context."""
        return self._nothing


class ShowProfile(Callback):
    """Write the table of Lightning's profiler into the run folder, and print its top.

    Args:
        folder: Run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table; stop profiling before the closing test, which would be counted in."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
        simple = isinstance(profiler, SimpleProfiler)
        show(self.folder, times(profiler) if simple else profiler.summary().strip())


class TorchProfile(Callback):
    """torch's profiler over a few training steps: a table of its operators, and a trace to look at.

    Lightning's own continues through validation, whose operators replace those of training.

    Args:
        folder: Run folder.
        steps: Batches that are recorded, after two to warm up.
    """

    def __init__(self, folder: Path, steps: int = 10) -> None:
        self.folder, self.steps = folder, steps
        self._profile: profile | None = None
        self._done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first batch."""
        activities = [ProfilerActivity.CPU]
        if pl_module.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        wait = min(1, int(trainer.num_training_batches) - 1)
        plan = schedule(wait=0, warmup=wait, active=self.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan)
        self._profile.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the step; stop before an epoch ends, to exclude validation."""
        if self._profile is None:
            return
        self._done += 1
        if trainer.is_last_batch or self._done > self.steps:
            self._stop(trainer)
        else:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop recording."""
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        if not trainer.is_global_zero:
            return
        (self.folder / TRACE).unlink(missing_ok=True)  # a link is not followed
        recorded.export_chrome_trace(str(self.folder / TRACE))
        device = "cuda" if ProfilerActivity.CUDA in recorded.activities else "cpu"
        averages = recorded.key_averages()
        table = averages.table(
            sort_by=f"self_{device}_time_total", row_limit=40, max_name_column_width=45
        )
        write_whole(self.folder / PROFILE, table)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the top of the table."""
        path = self.folder / PROFILE
        if trainer.is_global_zero and path.is_file():
            show(self.folder, path.read_text().strip())


@rank_zero_only
def show(folder: Path, text: str) -> None:
    """Keep a table as a file and print its first lines."""
    write_whole(folder / PROFILE, f"{text}\n")
    log_info("\n".join(line.rstrip() for line in text.splitlines()[:SHOWN_LINES]))
    log_info(f"The whole table: {folder / PROFILE}")


def times(profiler: SimpleProfiler) -> str:
    """Return a table of a simple profiler, longest first; its own is 300 columns wide."""
    total = time.perf_counter() - profiler.start_time
    rows = [f"{'action':{WIDTH}}  {'calls':>7}  {'mean s':>9}  {'total s':>9}  {'%':>5}"]
    actions = sorted(profiler.recorded_durations.items(), key=lambda item: -sum(item[1]))
    for action, seconds in actions:
        name = re.sub(r"\{.*?\}", "", action)  # the options of a callback
        cost = sum(seconds)
        rows.append(
            f"{name[:WIDTH]:{WIDTH}}  {len(seconds):7}  {cost / len(seconds):9.5f}  {cost:9.3f}  "
            f"{100 * cost / total:5.1f}"
        )
    return "\n".join(rows)
