"""Optimiser and schedule of a task, built for its trainer."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR

from tasks.engine.batches import batches_of_step
from tasks.engine.optimisation.optimizer import (
    SCHEDULE_FREE,
    build_optimizer,
    learning_rate_factor,
    optimizer_class,
    scaled_lr,
)

# Optimisers with one kernel for all parameters; on a CPU torch otherwise loops over them, which
# takes AdamW three times as long.
FUSED: dict[str, tuple[type[torch.optim.Optimizer], ...]] = {
    "cpu": (torch.optim.AdamW,),
    "cuda": (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD),
}

log_info = rank_zero_only(logging.getLogger(__name__).info)


def optimizer_and_schedule(task: Any) -> OptimizerLRScheduler:
    """Build a task's optimiser, and a schedule that moves at every step."""
    options, trainer = dict(task.optimizer_options), task.trainer
    kinds = FUSED.get(trainer.strategy.root_device.type, ())
    # In mixed precision Lightning cannot clip the gradients of a fused optimiser, which in float16
    # also unscales them by itself, after they are logged.
    clips = trainer.gradient_clip_val is not None and trainer.precision.endswith("-mixed")
    is_separate = clips or trainer.precision == "16-mixed" or options.keys() & {"fused", "foreach"}
    if optimizer_class(options["name"]) in kinds and not is_separate:
        options["fused"] = True  # False would keep torch from its second choice, foreach
    trainer.fit_loop.setup_data()  # the estimate skips it if epochs are unlimited
    batch = examples_per_step(trainer) if options.get("reference_batch") else None
    task.check_training(trainer.strategy, batch or 1)
    for note in getattr(task.model, "training_notes", ()):
        log_info(note)
    optimizer = build_optimizer(task.model, task._rules, batch, **options)
    if options["name"] in SCHEDULE_FREE:
        from tasks.engine.callbacks.ema import ScheduleFreeAverage

        task.ema = ScheduleFreeAverage(optimizer, task.model)
    steps = int(trainer.estimated_stepping_batches)
    warning = None if task.ema is None else task.ema.decay_warning(steps)
    if warning is not None:
        log_info(warning)
    factor = task.schedule_factor(
        steps,
        math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches),
        scaled_lr(options["lr"], options.get("reference_batch"), batch or 1),
    )
    scheduler = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def check_training(task: Any, strategy: Any, batch: int) -> None:
    """Refuse options of a task and its trainer that exclude each other, before anything is written.

    Args:
        task: Task to train.
        strategy: Strategy of the trainer.
        batch: Examples per optimiser step, over all processes and accumulated batches.

    Raises:
        ValueError: Sharded weights would be averaged, or a rate exceeds the one for this batch.
    """
    options = task.optimizer_options
    is_schedule_free = options["name"] in SCHEDULE_FREE
    if isinstance(strategy, FSDPStrategy) and (is_schedule_free or task.ema is not None):
        remedy = "another optimizer.name" if is_schedule_free else "task.ema=null"
        raise ValueError(
            f"sharded weights cannot be averaged: pass {remedy}, or trainer=ddp to keep the average"
        )
    if is_schedule_free and task.schedule_options["name"] != "constant":
        raise ValueError(
            f"optimizer.name={options['name']} averages the weights instead of lowering the "
            "rate: pass schedule.name=constant, with or without a warm-up"
        )
    if is_schedule_free:
        from tasks.engine.callbacks.ema import WeightEMA

        if type(task.ema) is WeightEMA:
            raise ValueError(
                f"optimizer.name={options['name']} keeps its own average of the weights: pass "
                "task.ema=null"
            )
    rate = scaled_lr(options["lr"], options.get("reference_batch"), batch)
    learning_rate_factor(1, 1, rate, **task.schedule_options)


def examples_per_step(trainer: Any) -> int:
    """Return the number of examples per optimiser step, over all processes.

    Raises:
        ValueError: The data lack a batch size.
    """
    source = trainer.datamodule or trainer.train_dataloader
    if getattr(source, "batch_size", None) is None:
        raise ValueError(
            "optimizer.reference_batch needs the batch size, which these data lack; "
            "pass a datamodule, or leave reference_batch out"
        )
    processes, batch = trainer.world_size, source.batch_size
    if hasattr(source, "training_batch"):  # of our datamodules
        batch = source.training_batch(processes)
    return int(batch * processes * batches_of_step(trainer, 0))
