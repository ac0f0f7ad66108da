"""mode=predict: print answers, and write them to files in the run folder."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from backbones.checkpoints.opening import Checkpoint
from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.batches import UNREADABLE
from tasks.engine.loading import read_targets
from tasks.engine.loops.process_exchange import gather_objects
from tasks.engine.run_folder.predictions import saved_rows
from tasks.engine.run_folder.run_config import RunConfig

log_info = rank_zero_only(logging.getLogger(__name__).info)

SHOWN = 20  # inputs whose answers are printed


def needs_no_data(config: RunConfig, datamodule: BaseDataModule, checkpoint: Checkpoint) -> bool:
    """Return True if a run only predicts the user's inputs and can omit the data set.

    The targets then come from the checkpoint; all of ours have them.
    """
    targets = read_targets(config.task, checkpoint)
    if targets is not None:
        datamodule.predict_only(**targets)
    return targets is not None


def predict(trainer: Trainer, task: BaseTask, datamodule: BaseDataModule) -> dict[str, float]:
    """Print the answers and write predictions.json: an entry per image, in the files' order."""
    batches = trainer.predict(task, datamodule=datamodule) or []
    parts = gather_objects([row for batch in batches for row in batch])
    # Process i predicts every n-th image, starting at the i-th.
    all_rows = [row for group in itertools.zip_longest(*parts) for row in group if row is not None]
    broken = [row for row in all_rows if UNREADABLE in row]
    rows = [row for row in all_rows if UNREADABLE not in row]
    if broken and not rows:
        raise ValueError(broken[0][UNREADABLE])
    if trainer.is_global_zero:
        folder = Path(trainer.default_root_dir)
        for row in rows[:SHOWN]:
            log_info(f"{Path(row['input']).name}: {task.answer(row)}")
        if len(rows) > SHOWN:
            log_info(f"... and {len(rows) - SHOWN} more in predictions.json")
        with saved_rows(folder) as add:
            for row in rows:
                add(row)
        task.write_results(folder, rows)
        for row in broken[:SHOWN]:
            log_info(f"Left out: {row[UNREADABLE]}")
        if broken:
            log_info(
                f"{len(broken):,} of {len(all_rows):,} {task.family.unit} cannot be read and are "
                "left out"
            )
    unreadable = {"unreadable": float(len(broken))} if broken else {}
    return {task.family.unit: float(len(rows)), **unreadable}
