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

from tasks.engine.loops.lightning_private import EpochLoop
from tasks.engine.loops.signals import STOP, RunStopped

# A separate logger, because runs silence Lightning's.
log_info = rank_zero_only(logging.getLogger(__name__).info)


class KeepLast(Checkpoint):
    """Save the last checkpoint every few minutes, around each validation, and on a signal.

    Every epoch ends with a checkpoint. Checkpoints are saved between two optimiser steps.

    On a signal (see ``STOP``), finish the step, save and stop. After the last step, finish
    validation first. Outside training, stop at once. If no batch arrives, save without a step.

    Args:
        last: Checkpoint file.
        minutes: Longest time between two checkpoints; None or 0 disables this limit.
    """

    # Lightning calls Checkpoint callbacks last, when the state of all others is final.

    def __init__(self, last: Path, minutes: float | None = None) -> None:
        self.last = last
        self.seconds = (minutes or 0) * 60
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make signals finish the step and save, from here on."""
        STOP.finishing, STOP.joined = True, trainer.world_size > 1
        self._since = time.monotonic()

    def on_validation_start(self, *_: Any) -> None:
        """Wait for the first batch; the state before a validation is saved."""
        STOP.begin_wait()

    def on_validation_batch_start(self, *_: Any) -> None:
        """Stop at once on a signal, unless the validation is part of training."""
        STOP.end_wait()
        STOP.raise_if_signalled()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Wait for the next batch."""
        STOP.begin_wait()

    def on_validation_epoch_end(self, *_: Any) -> None:
        """End the wait after the last batch."""
        STOP.end_wait()

    def on_test_batch_start(self, *_: Any) -> None:
        """Stop at once on a signal."""
        STOP.raise_if_signalled()

    def on_predict_batch_start(self, *_: Any) -> None:
        """Stop at once on a signal."""
        STOP.raise_if_signalled()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Make signals stop the run at once while it cleans up; save if only the data hang."""
        STOP.end_wait()
        STOP.finishing = False
        if not isinstance(exception, RunStopped) or not exception.waiting:
            return
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        # Other processes may be within a step.
        if trainer.training and trainer.world_size == 1 and loop.is_between_steps:
            self._save(trainer)
        self._stopped(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save before a validation, after ``minutes``, and on a signal; log the step first.

        A resumed run continues after the saved step, so the step's log row must exist by then.
        """
        STOP.end_step()
        last = trainer.is_last_batch
        if not last and (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        if loop.validation_follows:
            loop.save = partial(self._save, trainer)
        # All processes must agree, because all take part in saving.
        elif not last and self._in_any_process(
            trainer, STOP.signum is not None or self._is_save_due()
        ):
            loop.save = partial(self._save, trainer)
            self._stop_on_signal(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a validation within an epoch."""
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        within = not (trainer.is_last_batch or loop.training_done or trainer.should_stop)
        if trainer.state.fn == TrainerFn.FITTING and within:
            self._save(trainer)
            self._stop_on_signal(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save when the results of the epoch are complete."""
        self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop on a signal, now that the previous epoch is saved."""
        if self._in_any_process(trainer, STOP.signum is not None):
            raise self._stopped(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop on a signal, now that the last epoch is saved; later signals stop at once."""
        STOP.finishing = False
        self.on_train_epoch_start(trainer, pl_module)

    def _save(self, trainer: Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            for log in trainer.loggers:
                log.save()  # write buffered rows, which a kill would lose
            trainer.save_checkpoint(self.last)
            self._since = time.monotonic()

    def _is_save_due(self) -> bool:
        return 0 < self.seconds <= time.monotonic() - self._since

    def _stop_on_signal(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        if self._in_any_process(trainer, STOP.signum is not None):
            loop.stop = self._stopped(trainer)

    @staticmethod
    def _in_any_process(trainer: Trainer, flag: bool) -> bool:
        """Return True if ``flag`` is True in any process."""
        return trainer.strategy.reduce_boolean_decision(flag, all=False)

    def _stopped(self, trainer: Trainer) -> RunStopped:
        log_info(
            f"Stopped after step {trainer.global_step}; to continue, add resume=true to the command"
        )
        STOP.signum = STOP.signum or signal.SIGTERM  # None where another process got it
        return RunStopped(STOP.signum)
