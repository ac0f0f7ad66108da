"""Callbacks of every run: exact resume, an orderly end on a signal, and progress lines for logs."""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from tasks.gather import gather_objects
from tasks.pace import Pace

# Not Lightning's own logger, whose remarks a run keeps quiet.
say = rank_zero_only(logging.getLogger(__name__).info)


@dataclass(frozen=True)
class Position:
    """Where in the data and the schedule a checkpoint was written.

    Attributes:
        step: Optimiser steps done.
        batches: Batches that each process has trained on, over all epochs.
        batches_per_epoch: The same in one epoch.
        world_size: Number of processes.
    """

    step: int
    batches: int
    batches_per_epoch: int
    world_size: int

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.batches // self.batches_per_epoch

    @property
    def batch(self) -> int:
        """The next batch within its epoch."""
        return self.batches % self.batches_per_epoch


class ExactResume(Callback):
    """Save position and random generators with each checkpoint, and set the generators on resume.

    With the datamodules' seeded order and samples, a run that was broken off and resumed ends with
    the weights of one that was not; Lightning saves neither. All is stored as tensors and plain
    values, so that a checkpoint still loads without running code.
    """

    def __init__(self) -> None:
        self._restore: dict[str, Any] | None = None
        self._expected: Position | None = None

    @staticmethod
    def position(checkpoint: dict[str, Any]) -> Position:
        """Where a checkpoint was written.

        Raises:
            ValueError: The checkpoint is not one of a training run of ours.
        """
        if "position" not in checkpoint:
            raise ValueError("the checkpoint holds weights, but no training run to go on with")
        return Position(**checkpoint["position"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add position and generators, and refuse to save weights that are not finite."""
        for name, value in checkpoint["state_dict"].items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{name} holds NaN or Inf; the checkpoint before is kept")
        checkpoint["position"] = asdict(_position(trainer))
        checkpoint["random_state"] = gather_objects(random_state())

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state until training goes on."""
        self._expected = self.position(checkpoint)
        states = checkpoint["random_state"]
        self._restore = states[trainer.global_rank % len(states)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to go on with other batches than the run began with."""
        if self._expected is None:
            return
        now = _position(trainer)
        for name, what in (
            ("world_size", "processes"),
            ("batches_per_epoch", "batches in an epoch"),
        ):
            before, after = getattr(self._expected, name), getattr(now, name)
            if before != after:
                raise ValueError(
                    f"the run to resume had {before} {what}, now there are {after}; resume it "
                    "with the same data and devices, or start a new run"
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the state when all loaders exist and nothing else will draw before the model does."""
        if self._restore is not None:
            set_random_state(self._restore)
            self._restore = None


class Stopped(SystemExit):
    """The run was told to end; the program ends with the status that shells give to a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class StopOnSignal(Callback):
    """Ctrl-C or SIGTERM: finish the step and, after the last one, validation; save; stop.

    A second signal, or one while nothing trains, stops at once. Lightning would end with status 0
    and save nothing, and talks to other processes inside its handler.

    Args:
        last: The checkpoint to write.
    """

    def __init__(self, last: Path) -> None:
        self.last = last
        self._signum: int | None = None
        self._training = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's handlers."""
        self._training = True
        self._listen()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, to stop at once."""
        self._training = False
        self._listen()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, unless it is training that validates."""
        self._listen()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, to stop at once."""
        self._listen()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save and stop, unless the epoch ends here: then validation comes first."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and not trainer.is_last_batch and self._told(trainer):
            trainer.save_checkpoint(self.last)
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, also where no validation has."""
        if self._told(trainer):
            trainer.save_checkpoint(self.last)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop now that the epoch before is saved."""
        if self._told(trainer):
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same after the last epoch."""
        self.on_train_epoch_start(trainer, pl_module)

    def _listen(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._signum is not None or not self._training:
            raise Stopped(signum)
        self._signum = signum

    def _told(self, trainer: Trainer) -> bool:
        """Whether any process was told to stop; all must agree, as saving takes all of them."""
        return trainer.strategy.reduce_boolean_decision(self._signum is not None, all=False)

    def _stop(self, trainer: Trainer) -> None:
        say(f"Stopped after step {trainer.global_step}; with resume=true the same command goes on")
        raise Stopped(self._signum or signal.SIGTERM)


class ProgressLines(Callback):
    """Lines in place of a bar, where none can be drawn (a log file, a scheduler).

    Args:
        every: Seconds between two lines within an epoch.
        pace: Which knows the images per second and the time left, to be shown.
    """

    def __init__(self, every: float = 30.0, *, pace: Pace | None = None) -> None:
        self.every, self.pace = every, pace
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
            loss = {"train/loss": trainer.callback_metrics["train/loss"]}
            self._print(f"  step {batch_idx + 1}/{trainer.num_training_batches}", loss)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print loss, main metrics and time of the epoch."""
        where = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        self._print(where, trainer.progress_bar_metrics)

    def _print(self, where: str, metrics: Mapping[str, Any]) -> None:
        shown = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        pace = f"  {self.pace}" if self.pace is not None and str(self.pace) else ""
        say(f"{where}  {shown}{pace}  ({time.perf_counter() - self._epoch_start:.0f} s)")


def random_state() -> dict[str, Any]:
    """State of all global generators of a process, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": [kind, words, position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``random_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _position(trainer: Trainer) -> Position:
    # "ready" counts the batches begun and is right in every hook; "completed" lags behind in some.
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    return Position(
        trainer.global_step, batches, int(trainer.num_training_batches), trainer.world_size
    )
