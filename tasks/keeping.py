"""When the last checkpoint of a run is written, and an orderly end on a signal."""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from tasks.loops import EpochLoop

# Not Lightning's own logger, whose remarks a run keeps quiet.
say = rank_zero_only(logging.getLogger(__name__).info)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(SystemExit):
    """The run was told to end; the program ends with the status that shells give to a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class KeepLast(Checkpoint):
    """Write the last checkpoint: by the clock, before and after each validation, and on a signal.

    That is at the end of each epoch in any case. It always lies between two steps of the optimiser.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: finish the step and, after the last one, validation; save;
    stop. A second signal, or one while nothing trains, stops at once. Lightning would end with
    status 0 and save nothing, and talks to other processes inside its handler. Where SLURM requeues
    the job on SIGUSR1, that signal is left to Lightning.

    Args:
        last: The file.
        minutes: The longest time between two checkpoints; None or 0 for no such limit.
    """

    # Being a Checkpoint, it is asked last, when all other callbacks have their state for the file.

    def __init__(self, last: Path, minutes: float | None = None) -> None:
        self.last = last
        self.seconds = (minutes or 0) * 60
        self._signum: int | None = None
        self._training = False
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's signal handlers: a signal ends the step, saves and stops."""
        self._training = True
        self._since = time.monotonic()
        self._listen(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's signal handlers: a signal stops the test at once."""
        self._training = False
        self._listen(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's signal handlers; outside training a signal stops at once."""
        self._listen(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over from Lightning's signal handlers: a signal stops the prediction at once."""
        self._listen(trainer)

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
        elif not last and self._any(trainer, self._signum is not None or self._is_time()):
            loop.save = partial(self._save, trainer)
            self._stop_if_told(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a validation within an epoch."""
        loop = trainer.fit_loop.epoch_loop
        within = not (trainer.is_last_batch or loop._is_training_done or trainer.should_stop)
        if trainer.state.fn == TrainerFn.FITTING and within:
            self._save(trainer)
            self._stop_if_told(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save when all is known about the epoch."""
        self._save(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop now that the epoch before is saved."""
        if self._any(trainer, self._signum is not None):
            raise self._stopped(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, if told to, now that the last epoch is saved."""
        self.on_train_epoch_start(trainer, pl_module)

    def _save(self, trainer: Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            for log in trainer.loggers:
                log.save()  # a kill would take the rows with it
            trainer.save_checkpoint(self.last)
            self._since = time.monotonic()

    def _is_time(self) -> bool:
        return 0 < self.seconds <= time.monotonic() - self._since

    def _listen(self, trainer: Trainer) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        slurm = environment if isinstance(environment, SLURMEnvironment) else None
        requeue = slurm.requeue_signal if slurm and slurm.auto_requeue else None
        for signum in SIGNALS:
            # nohup has a run ignore that its terminal is gone.
            ignored = signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN
            if not (signum == requeue or ignored):
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._signum is not None or not self._training:
            raise Stopped(signum)
        self._signum = signum

    def _stop_if_told(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        if self._any(trainer, self._signum is not None):
            loop.stop = self._stopped(trainer)

    @staticmethod
    def _any(trainer: Trainer, own: bool) -> bool:
        """Whether it holds for any process."""
        return trainer.strategy.reduce_boolean_decision(own, all=False)

    def _stopped(self, trainer: Trainer) -> Stopped:
        say(f"Stopped after step {trainer.global_step}; with resume=true the same command goes on")
        return Stopped(self._signum or signal.SIGTERM)
