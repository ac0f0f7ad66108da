"""Callbacks of every run: exact resume and progress lines for logs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

# Not Lightning's own logger, whose remarks a run keeps quiet.
say = rank_zero_only(logging.getLogger(__name__).info)


class ExactResume(Callback):
    """Save the state of all random generators with each checkpoint and set it again on resume.

    With the datamodules' seeded order and samples, a run that was broken off and resumed ends with the
    weights of one that was not. Lightning saves no random state. The state is stored as tensors and
    plain values, so that a checkpoint still loads without running code.
    """

    def __init__(self) -> None:
        self._restore: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the generators' state, and refuse to save weights that are not finite."""
        for name, value in checkpoint["state_dict"].items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{name} holds NaN or Inf; the checkpoint before is kept")
        checkpoint["random_state"] = random_state()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state until training goes on."""
        self._restore = checkpoint.get("random_state")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the state when all loaders exist and nothing else will draw before the model does."""
        if self._restore is not None:
            set_random_state(self._restore)
            self._restore = None


class ProgressLines(Callback):
    """Lines in place of a bar, where none can be drawn (a log file, a scheduler).

    Args:
        every: Seconds between two lines within an epoch.
    """

    def __init__(self, every: float = 30.0) -> None:
        self.every = every
        self._epoch_start = self._last_line = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self._epoch_start = self._last_line = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print where training stands, now and then."""
        if time.perf_counter() - self._last_line >= self.every:
            self._last_line = time.perf_counter()
            self._print(
                trainer, f"  step {batch_idx + 1}/{trainer.num_training_batches}", ("train/loss",)
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print loss, metrics and time of the epoch."""
        names = (
            "train/loss",
            *(name for name in trainer.callback_metrics if name.startswith("val/")),
        )
        self._print(trainer, f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", names)

    def _print(self, trainer: Trainer, where: str, names: Sequence[str]) -> None:
        metrics = trainer.callback_metrics
        shown = "  ".join(f"{name} {float(metrics[name]):.4g}" for name in names if name in metrics)
        say(f"{where}  {shown}  ({time.perf_counter() - self._epoch_start:.0f} s)")


def random_state() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and CUDA's global generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``random_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
