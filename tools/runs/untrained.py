"""A run of a network without weights to train, such as a naive forecast."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.checkpoints.files import BEST
from tools.runs.trainer import evaluate

log_info = rank_zero_only(logging.getLogger(__name__).info)


def evaluate_once(engine: Trainer, task: BaseTask, datamodule: BaseDataModule) -> dict[str, float]:
    """Validate and test a network without weights, and save its checkpoint for predictions.

    Args:
        engine: Lightning's trainer.
        task: Task of a network without trainable weights.
        datamodule: The data.
    """
    log_info("The network has no weights to train: it is evaluated at once")
    validated = evaluate(engine, "validate", task, datamodule)
    loggers: list[Any] = engine.loggers
    for log in loggers:
        log.log_metrics({f"val/{name}": value for name, value in validated.items()}, 0)
        log.save()
    metrics = evaluate(engine, "test", task, datamodule)
    checkpoint: dict[str, Any] = {"state_dict": task.state_dict(), "epoch": 0, "global_step": 0}
    task.on_save_checkpoint(checkpoint)
    path = Path(engine.default_root_dir) / "checkpoints" / BEST
    if engine.is_global_zero:
        engine.strategy.checkpoint_io.save_checkpoint(checkpoint, path)
    return metrics
