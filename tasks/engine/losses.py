"""Training loss of a batch: sum, check and logging interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones import Mixer
from backbones.options import listed
from tasks.engine.batches import Batch, batch_size


def total_loss(model: Any, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Return the losses of a batch and the sum of those with "loss" in the name.

    Losses of mixers (``Mixer.take_penalty``) are added as "auxiliary_loss".

    Raises:
        ValueError: Batch norm gets one value per channel.
    """
    try:
        losses: dict[str, Tensor] = model.loss(batch)
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"batch norm needs more than one value per channel, but the batch is of "
            f"{batch_size(batch)}; pass data.batch_size=2 or more, or for UperNet "
            "head.group_norm=true"
        ) from error
    penalties = (part.take_penalty() for part in model.modules() if isinstance(part, Mixer))
    if auxiliary := [loss for loss in penalties if loss is not None]:
        losses = {**losses, "auxiliary_loss": torch.stack(auxiliary).sum()}
    parts = [value for name, value in losses.items() if "loss" in name]
    return losses, torch.stack(parts).sum()


def loss_problem(loss: Tensor, trainer: Any, step: int, batch: Batch) -> str | None:
    """Return why training stops at a loss that is not finite; None for any other loss.

    Args:
        loss: Sum of the losses.
        trainer: Lightning's trainer, or None.
        step: Optimiser step.
        batch: The batch; inputs with NaN are named by their files.
    """
    value = loss.item()
    if math.isfinite(value):  # 20 times faster than torch's
        return None
    folder = None if trainer is None else Path(trainer.default_root_dir) / "checkpoints"
    is_saved = folder is not None and any(folder.glob("*.ckpt"))
    remark = "the last checkpoint stays" if is_saved else "before the first checkpoint"
    files = _broken_inputs(batch, getattr(trainer, "datamodule", None))
    remedy = "Lower optimizer.lr, lengthen schedule.warmup, or set trainer.gradient_clip_val"
    if files:
        remedy = f"Correct the inputs, which hold NaN or infinite values: {listed(files)}"
    return f"the loss is {value} at step {step}; training stops here, {remark}. {remedy}"


def _broken_inputs(batch: Batch, datamodule: Any) -> list[str]:
    """Return the files of a training batch's inputs with NaN or infinite values."""
    samples = batch.get("sample_id") if isinstance(batch, Mapping) else None
    if samples is None or datamodule is None:
        return []
    rows: set[int] = set()
    for values in batch.values():
        is_input = isinstance(values, Tensor) and values.is_floating_point() and values.ndim > 0
        if is_input and len(values) == len(samples):
            finite = values.isfinite().flatten(1).all(1) if values.ndim > 1 else values.isfinite()
            rows |= set((~finite).nonzero().flatten().tolist())
    describe = getattr(datamodule.dataset("train"), "describe", str)
    return [describe(samples[row].item()) for row in sorted(rows)]


def is_logged(trainer: Any, step: int, batch_idx: int) -> bool:
    """Return True if the losses of a batch are logged, or read when it ends.

    Other batches skip the exchange of losses between processes; progress shows ``latest_loss``. All
    processes must return the same.
    """
    every = trainer.log_every_n_steps
    if every and step % every == 0:
        return True
    if batch_idx + 1 == trainer.num_training_batches or step == trainer.max_steps:
        return True
    validated = trainer.val_check_batch  # None if validation follows a time interval
    return validated is None or (batch_idx + 1) % validated == 0
