"""Measure and show the speed of a training and the time left."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tasks.engine.batches import batch_size
from tasks.engine.loops.lightning_private import DescribedBar

MOST_GAPS = 100  # batches between two readings, at which this process waits for a GPU


class Pace(Callback):
    """Training examples per second and the time left.

    The rate covers the time between the ends of two batches, including waiting for data. It
    excludes validation and the first batch of each epoch, which waits for the loaders to start.
    The time left is extrapolated from all time since the start.

    Waiting is that of the device. A GPU computes behind this process, so events in its queue
    measure the time between the last kernel of a batch and the arrival of the next one.
    """

    def __init__(self) -> None:
        self.unit = "examples"
        self._images = 0
        self._seconds = self._waited = 0.0
        self._mark: float | None = None
        self._batch_start = 0.0
        self._start = 0.0
        self._first_step = 0
        self._steps = 0.0
        self._left: float | None = None
        self._ended: torch.cuda.Event | None = None  # the previous batch, on a GPU
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of all processes together; None before the second batch."""
        return self._images / self._seconds if self._seconds else None

    @property
    def waiting_share(self) -> float | None:
        """Share of the time that the device waited for batches; None before the second batch."""
        self._read_gaps()
        return self._waited / self._seconds if self._seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the end of training; None until it can be estimated."""
        return self._left

    def __str__(self) -> str:
        """``85.3 images/s, 3 min 20 s left``, as far as known."""
        rate, seconds = self.samples_per_second, self.seconds_left
        parts = [] if rate is None else [f"{rate:.3g} {self.unit}/s"]
        return ", ".join([*parts, f"{duration(seconds)} left"] if seconds else parts)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.unit = pl_module.family.unit  # type: ignore[union-attr,assignment]
        self._start, self._first_step = time.perf_counter(), trainer.global_step
        self._steps = float(trainer.estimated_stepping_batches)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the start of the loaders."""
        self._mark = self._ended = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the validation; training may continue within the epoch."""
        self._mark = time.perf_counter()
        self._ended = _event(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when a batch arrives, for which the run has waited since the previous one."""
        self._batch_start = time.perf_counter()
        start = _event(trainer)
        if start is not None and self._ended is not None:
            self._gaps.append((self._ended, start))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the images of a batch if the end of the previous one is known."""
        now = time.perf_counter()
        if self._mark is not None:
            self._images += batch_size(batch) * trainer.world_size
            self._seconds += now - self._mark
            if self._ended is None:
                self._waited += self._batch_start - self._mark
        self._mark, self._ended = now, _event(trainer)
        if len(self._gaps) > MOST_GAPS:
            self._read_gaps()
        steps, rest = trainer.global_step - self._first_step, self._steps - trainer.global_step
        if steps and rest < float("inf"):
            self._left = rest * (now - self._start) / steps

    def _read_gaps(self) -> None:
        """Add the waits that a GPU has measured."""
        for ended, start in self._gaps:
            start.synchronize()
            self._waited += ended.elapsed_time(start) / 1000  # from milliseconds
        self._gaps.clear()


def _event(trainer: Trainer) -> torch.cuda.Event | None:
    """Record an event in the queue of the trainer's GPU; None on another device."""
    if trainer.strategy.root_device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def epochs_to_run(trainer: Any) -> int:
    """Return the epochs that a training begins by its limits; -1 without any."""
    if trainer.max_steps < 0:
        return int(trainer.max_epochs)
    begun = math.ceil(trainer.max_steps / _steps_per_epoch(trainer))
    return begun if trainer.max_epochs < 0 else min(begun, trainer.max_epochs)


def batches_to_run(trainer: Any) -> int:
    """Return the batches of the current epoch, which ``max_steps`` may end early."""
    batches = trainer.num_training_batches
    if trainer.max_steps < 0:
        return int(batches)
    steps = trainer.max_steps - trainer.current_epoch * _steps_per_epoch(trainer)
    return int(min(batches, steps * trainer.accumulate_grad_batches))


def _steps_per_epoch(trainer: Any) -> int:
    return max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))


def latest(task: Any) -> dict[str, Any]:
    """Return the loss of the last training batch for display; empty before the first."""
    loss = getattr(task, "latest_loss", None)
    return {} if loss is None else {"train/loss": loss}


class PaceBar(DescribedBar):
    """Lightning's bar with the images per second and the time left of the whole training."""

    def __init__(self, pace: Pace, refresh_rate: int = 5) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._pace = pace
        self._drawn = 0.0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Read the losses, for which a GPU waits, only when the bar is redrawn."""
        due = time.perf_counter() - self._drawn >= 1 / self.refresh_rate
        if due or batch_idx + 1 == batches_to_run(trainer):
            self._drawn = time.perf_counter()
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @property
    def total_train_batches(self) -> int:
        """Batches of an epoch, where its bar ends."""
        return batches_to_run(self.trainer)

    def describe_epoch(self, epoch: int) -> str:
        """Return ``Epoch 0/9``, padded to the width of the validation's description."""
        text = f"Epoch {epoch}"
        epochs = epochs_to_run(self.trainer)
        text += f"/{epochs - 1}" if epochs > 0 else ""
        return f"{text:{len(self.validation_description)}}"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics shown behind the bar."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics |= {name: loss.item() for name, loss in latest(pl_module).items()}
        rate, seconds = self._pace.samples_per_second, self._pace.seconds_left
        metrics |= {} if rate is None else {f"{self._pace.unit}/s": f"{rate:.3g}"}
        return metrics | ({"left": duration(seconds)} if seconds else {})


def duration(seconds: float) -> str:
    """``12 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"
