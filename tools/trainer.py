"""Lightning's Trainer as every run uses it, and the four things done with it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy

from datamodules import BaseDataModule
from tasks.base import BaseTask
from tasks.callbacks import ExactResume, ProgressLines
from tasks.checkpoint_io import AtomicCheckpointIO
from tasks.csv_log import CsvLog
from tasks.gather import gather_objects
from tools.run_folder import checkpoint_file

logger = logging.getLogger(__name__)


def make_trainer(options: Mapping[str, Any], folder: Path, monitor: str) -> Trainer:
    """Build a Trainer that leaves metrics.csv, TensorBoard events and checkpoints/{last,best}.ckpt.

    Args:
        options: Arguments of Lightning's Trainer.
        folder: Run folder.
        monitor: Metric, higher is better, that chooses the best checkpoint.
    """
    # Lightning's remarks on devices, workers and its own products are not what a user needs to read.
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    interactive = sys.stdout.isatty()
    progress: Callback = RichProgressBar(refresh_rate=5) if interactive else ProgressLines()
    checkpoints = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        filename="best",
        monitor=monitor,
        mode="max",
        save_last=True,
        enable_version_counter=False,
    )
    return Trainer(
        **{**options, "strategy": _strategy(options["strategy"])},
        default_root_dir=folder,
        logger=[
            CsvLog(folder / "metrics.csv"),
            TensorBoardLogger(folder, name="", version="tensorboard"),
        ],
        callbacks=[checkpoints, LearningRateMonitor("step"), ExactResume(), progress],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=interactive,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the datamodules' samplers know the processes
    )


def _strategy(name: str) -> str | DDPStrategy:
    # Processes evaluate different numbers of batches, so evaluation must not wait for the others, which
    # DDP's exchange of buffers would do. Running statistics are kept in step by sync_batchnorm.
    return DDPStrategy(broadcast_buffers=False) if name == "ddp" else name


def fit(
    trainer: Trainer, task: BaseTask, datamodule: BaseDataModule, *, resume: bool
) -> dict[str, float]:
    """Train, then evaluate the best checkpoint."""
    checkpoints = Path(trainer.default_root_dir) / "checkpoints"
    last = checkpoint_file(checkpoints / "last.ckpt") if resume else None
    if last is not None:
        logger.info("Resuming %s", last)
        _resume_data(trainer, datamodule, last)
    trainer.fit(task, datamodule=datamodule, ckpt_path=last, weights_only=True)
    best = checkpoints / "best.ckpt"
    return evaluate(trainer, task, datamodule, "test", str(best) if best.is_file() else None)


def evaluate(
    trainer: Trainer, task: BaseTask, datamodule: BaseDataModule, mode: str, ckpt: str | None
) -> dict[str, float]:
    """Metrics of a checkpoint, or of the weights as they are."""
    if ckpt is not None:
        task.load_weights(checkpoint_file(ckpt))
    run = trainer.validate if mode == "validate" else trainer.test
    results = run(task, datamodule=datamodule, verbose=False)
    return {name.partition("/")[2]: float(value) for name, value in results[0].items()}


def predict(
    trainer: Trainer, task: BaseTask, datamodule: BaseDataModule, ckpt: str
) -> dict[str, float]:
    """Write predictions.json: one entry per image."""
    task.load_weights(checkpoint_file(ckpt))
    batches = trainer.predict(task, datamodule=datamodule) or []
    rows = [
        row for part in gather_objects([row for batch in batches for row in batch]) for row in part
    ]
    for row in rows:
        if "sample_id" in row:
            row["image"] = datamodule.predict_name(row.pop("sample_id"))  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        path = Path(trainer.default_root_dir) / "predictions.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")
    return {"images": float(len(rows))}


def _resume_data(trainer: Trainer, datamodule: BaseDataModule, checkpoint: Path) -> None:
    """Let the data go on where the checkpoint was written."""
    progress = AtomicCheckpointIO().load_checkpoint(checkpoint)["loops"]["fit_loop"]
    batches = progress["epoch_loop.batch_progress"]["current"]["completed"]
    epoch = progress["epoch_progress"]["current"]["completed"]
    done = progress["epoch_loop.batch_progress"]["is_last_batch"]
    datamodule.resume_at(epoch, 0 if done else batches)
