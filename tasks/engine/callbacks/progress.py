"""Progress lines for logs, and the memory in which convolutions work."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from tasks.engine.callbacks.pace import Pace, batches_to_run, epochs_to_run, latest

# A separate logger, because runs silence Lightning's.
log_info = rank_zero_only(logging.getLogger(__name__).info)
log_warning = rank_zero_only(logging.getLogger(__name__).warning)

# timm's only models that pool with padding by a function, which ``correct_pooling`` cannot replace.
PADDED_POOLING = "timm.models.inception_v3"


class ChannelsLast(Callback):
    """Keep the weights of convolutions in channels-last memory, so that their maps follow."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Turn the weights, before there is an optimiser."""
        pl_module.to(memory_format=torch.channels_last)
        if any(type(part).__module__ == PADDED_POOLING for part in pl_module.modules()):
            log_warning(
                "inception_v3 pools with padding: with trainer.channels_last=true its gradients "
                "are wrong on a GPU in torch releases without the fix of pytorch #188344"
            )


class ProgressLines(Callback):
    """Lines in place of a bar, where none can be drawn (a log file, a scheduler).

    Args:
        every: Seconds between two lines within an epoch or an evaluation.
        pace: Which knows the images per second and the time left, to be shown.
    """

    def __init__(self, every: float = 30.0, *, pace: Pace | None = None) -> None:
        self.every, self.pace = every, pace
        self._epoch_start = self._evaluation_start = self._last_line = 0.0
        self._validated = False  # since the last line of an epoch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the next line of an epoch has figures of validation to show."""
        self._validated = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks, also of an epoch that a resumed run is in the middle of."""
        self._validated = False
        self.on_train_epoch_start(trainer, pl_module)

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
            where = f"  step {batch_idx + 1}/{batches_to_run(trainer)}"
            self._print(where, latest(pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks of a validation."""
        self._evaluation_start = self._last_line = time.perf_counter()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks of a test."""
        self.on_validation_start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Print where a long validation stands, now and then."""
        self._print_evaluation("validation", batch_idx, trainer.num_val_batches[dataloader_idx])

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Print where a long test stands, now and then."""
        self._print_evaluation("test", batch_idx, trainer.num_test_batches[dataloader_idx])

    def _print_evaluation(self, stage: str, index: int, batches: float) -> None:
        now = time.perf_counter()
        if now - self._last_line >= self.every:
            self._last_line = now
            passed = f"({now - self._evaluation_start:.0f} s)"
            log_info(f"  {stage} batch {index + 1}/{batches}  {passed}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print loss, time and, if the epoch was validated, main metrics."""
        epochs = epochs_to_run(trainer)
        where = f"epoch {trainer.current_epoch + 1}" + (f"/{epochs}" if epochs > 0 else "")
        metrics = {
            name: value
            for name, value in trainer.progress_bar_metrics.items()
            if self._validated or not name.startswith("val/")
        }
        self._validated = False
        self._print(where, metrics | latest(pl_module))

    def _print(self, where: str, metrics: Mapping[str, Any]) -> None:
        figures = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        pace = f"  {self.pace}" if self.pace is not None and str(self.pace) else ""
        log_info(f"{where}  {figures}{pace}  ({time.perf_counter() - self._epoch_start:.0f} s)")
