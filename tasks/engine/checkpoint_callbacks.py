"""Callback that saves the last checkpoint of a run regularly and on signals."""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from tasks.engine.lightning_private import EpochLoop
from tasks.engine.signals import STOP, RunStopped

# Not Lightning's own logger, whose remarks a run keeps quiet.
log_info = rank_zero_only(logging.getLogger(__name__).info)


class KeepLast(Checkpoint):
    """Write the last checkpoint: by the clock, before and after each validation, and on a signal.

    That is at the end of each epoch in any case. It always lies between two steps of the optimiser.

    On a signal, see ``STOP``: finish the step and, after the last one, validation; save; stop.
    Where no training runs, stop at once.

    Args:
        last: The file.
        minutes: The longest time between two checkpoints; None or 0 for no such limit.
    """

    # Being a Checkpoint, it is asked last, when all other callbacks have their state for the file.

    def __init__(self, last: Path, minutes: float | None = None) -> None:
        self.last = last
        self.seconds = (minutes or 0) * 60
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let a signal end the step and save, from here on."""
        STOP.finishing = True
        self._since = time.monotonic()

    def on_validation_batch_start(self, *_: Any) -> None:
        """Stop at once, unless the validation is one of a training."""
        STOP.raise_if_signalled()

    def on_test_batch_start(self, *_: Any) -> None:
        """Stop at once."""
        STOP.raise_if_signalled()

    def on_predict_batch_start(self, *_: Any) -> None:
        """Stop at once."""
        STOP.raise_if_signalled()

    def on_exception(self, *_: Any) -> None:
        """Let a signal that comes while the run cleans up end it at once."""
        STOP.finishing = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save before a validation, when it is time to, and on a signal; the step is logged first.

        What a checkpoint has done comes never again, and neither does its row in the logs.
        """
        last = trainer.is_last_batch
        if not last and (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        if loop.validation_follows:
            loop.save = partial(self._save, trainer)
        # All processes must agree, as saving takes all of them.
        elif not last and self._any(trainer, STOP.signum is not None or self._is_time()):
            loop.save = partial(self._save, trainer)
            self._stop_if_told(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a validation within an epoch."""
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        within = not (trainer.is_last_batch or loop.training_done or trainer.should_stop)
        if trainer.state.fn == TrainerFn.FITTING and within:
            self._save(trainer)
            self._stop_if_told(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save when all is known about the epoch."""
        self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop now that the epoch before is saved."""
        if self._any(trainer, STOP.signum is not None):
            raise self._stopped(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, if told to, now that the last epoch is saved; a later signal stops at once."""
        STOP.finishing = False
        self.on_train_epoch_start(trainer, pl_module)

    def _save(self, trainer: Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            for log in trainer.loggers:
                log.save()  # a kill would take the rows with it
            trainer.save_checkpoint(self.last)
            self._since = time.monotonic()

    def _is_time(self) -> bool:
        return 0 < self.seconds <= time.monotonic() - self._since

    def _stop_if_told(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        if self._any(trainer, STOP.signum is not None):
            loop.stop = self._stopped(trainer)

    @staticmethod
    def _any(trainer: Trainer, own: bool) -> bool:
        """Return True if it holds for any process."""
        return trainer.strategy.reduce_boolean_decision(own, all=False)

    def _stopped(self, trainer: Trainer) -> RunStopped:
        log_info(
            f"Stopped after step {trainer.global_step}; with resume=true the same command goes on"
        )
        STOP.signum = STOP.signum or signal.SIGTERM  # where another process was told to
        return RunStopped(STOP.signum)
