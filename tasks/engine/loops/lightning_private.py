"""Every use of a private symbol of Lightning, written for Lightning 2.6.6.

Lightning's own loops resume a run that ends by ``max_steps`` on the wrong batch or not at all, skip
the validation after the last step, and divide the losses of an epoch's last step by more batches
than it has. Its handlers of SIGTERM do not save, and its watch over processes ends a run silently.

Other files use public interfaces only. ``tests/tasks/test_lightning_private.py`` tests each symbol.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import Tensor

from tasks.engine.batches import batches_of_step
from tasks.engine.checkpoints.data_position import Position
from tasks.engine.loops.signals import STOP

LIGHTNING = "2.6.6"  # the version that this file was written for and is tested with


class MeanOfBatches(_AutomaticOptimization):
    """Optimiser steps with the mean gradient of the batches accumulated for them."""

    def _training_step(self, kwargs: Any) -> ClosureResult:
        # Lightning divides by accumulate_grad_batches, also where the epoch ends earlier.
        output = _call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        count = batches_of_step(self.trainer, kwargs["batch_idx"])
        return ClosureResult.from_training_step_output(output, count)


class InterruptibleFetcher:
    """Lightning's data fetcher with waits that end soon after a signal, see ``STOP``."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    def __next__(self) -> Any:
        STOP.begin_wait()
        try:
            batch = next(self._fetcher)
        finally:
            STOP.end_wait()
        STOP.begin_step()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


class EpochLoop(_TrainingEpochLoop):
    """One epoch; a validation follows the last step of the run, whatever the interval.

    A validation that falls due while batches are accumulated comes after their step, so that each
    checkpoint lies between two steps.

    Attributes:
        save: Called once when the step of the current batch is logged, before any validation.
        stop: Raised when the current batch is logged and validated.
    """

    save: Callable[[], None] | None = None
    stop: BaseException | None = None

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = MeanOfBatches(trainer)

    @property
    def validation_follows(self) -> bool:
        """True if a validation comes after the batch that was just trained on."""
        return self._should_check_val_fx(self.trainer.fit_loop._data_fetcher)

    @property
    def training_done(self) -> bool:
        """True after the last batch of the epoch or of the run."""
        return self._is_training_done

    @property
    def is_between_steps(self) -> bool:
        """True while the epoch waits for its next batch and has trained on those before it."""
        batches = self.batch_progress.current
        return 0 < batches.ready == batches.completed and not self._should_accumulate()

    def advance(self, data_fetcher: Any) -> None:
        """Train on the next batch."""
        fetcher: Any = InterruptibleFetcher(data_fetcher)
        super().advance(fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Save, validate and log, then raise ``stop``."""
        if self.save is not None:
            save, self.save = self.save, None
            save()
        super().on_advance_end(data_fetcher)
        if self.stop is not None:
            raise self.stop

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        ends = self._ends_training()
        if self._should_accumulate() and not ends:
            return False  # the optimiser step comes first
        if super()._should_check_val_fx(data_fetcher) or self._fell_due_within_the_step():
            return True
        return ends and bool(self.trainer.enable_validation)

    def _fell_due_within_the_step(self) -> bool:
        """Return True if a validation interval ended at a batch that was accumulated."""
        trainer = self.trainer
        every = trainer.val_check_batch  # None by the clock
        if not isinstance(every, int) or not self._should_check_val_epoch():
            return False
        by_epoch = trainer.check_val_every_n_epoch is not None
        count = 1 + (self.batch_idx if by_epoch else self.total_batch_idx)
        before = count - 1 - self.batch_idx % trainer.accumulate_grad_batches
        return count // every > before // every

    def _ends_training(self) -> bool:
        trainer = self.trainer
        if 0 <= self.max_steps <= self.global_step:
            return True
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            return True
        epochs = trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        return last_epoch and self._num_ready_batches_reached()


class FitLoop(_FitLoop):
    """Training that resumes from a ``Position``, whether it ends by epochs or by steps."""

    @property
    def done(self) -> bool:
        """True if all is done, including a validation that was interrupted."""
        progress = self.epoch_loop.val_loop.batch_progress.total
        owed = self.restarting and progress.completed < progress.ready
        return not owed and super().done

    def run(self) -> None:
        """Train; leave the same counts for the following test where no training was left."""
        super().run()
        self.epoch_loop._batches_that_stepped = self.epoch_loop.global_step
        epochs = self.epoch_progress.current
        epochs.completed = epochs.ready

    def _iteration_based_training(self) -> bool:
        # With max_steps Lightning always restarts within an epoch, even before the first batch.
        return False


def use_exact_loops(trainer: Trainer) -> None:
    """Replace the training loops of a trainer by those of this file."""
    fit_loop = trainer.fit_loop
    loop = FitLoop(trainer, min_epochs=fit_loop.min_epochs, max_epochs=fit_loop.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, fit_loop.min_steps, fit_loop.max_steps)
    trainer.fit_loop = loop


def loop_state(fresh: Mapping[str, Any], position: Position) -> dict[str, Any]:
    """Return the state of ``FitLoop`` from which a run continues at a position.

    Lightning's counters depend on the hook in which a checkpoint was written. Here they are set to
    one of the three states from which Lightning continues with the very next action.

    Args:
        fresh: The state of a loop that has not begun.
        position: Where to continue.
    """
    state = dict(fresh)
    unfinished = position.validation_due or position.batch > 0
    epoch = (position.batches - 1) // position.batches_per_epoch if unfinished else position.epoch
    trained = position.batches - epoch * position.batches_per_epoch
    begun = epoch + unfinished
    state["epoch_progress"] = _progress(begun, begun, epoch, epoch)
    # Lightning counts a step, and with it begins the next batch, when a validation is over.
    between = unfinished and not position.validation_due
    total, completed = position.batches, position.batches - between
    batches = _progress(total, total, total, completed)
    batches["current"] = _tracker(trained, trained, trained, trained - between)
    ends_epoch = trained == position.batches_per_epoch
    state["epoch_loop.batch_progress"] = {**batches, "is_last_batch": ends_epoch}
    due = int(position.validation_due)
    validation = {**_progress(due, due, 0, 0), "is_last_batch": False}
    state["epoch_loop.val_loop.batch_progress"] = validation
    stepped = position.step - unfinished
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    steps = {"ready": position.step, "completed": position.step}
    progress = {"total": steps, "current": steps}
    begun_steps = {**steps, "started": position.step}
    zeroed = {"total": begun_steps, "current": begun_steps}
    optimizer = {"optimizer": {"step": progress, "zero_grad": zeroed}}
    state["epoch_loop.automatic_optimization.optim_progress"] = optimizer
    state["epoch_loop.scheduler_progress"] = progress
    return state


def _progress(ready: int, started: int, processed: int, completed: int) -> dict[str, Any]:
    tracker = _tracker(ready, started, processed, completed)
    return {"total": tracker, "current": dict(tracker)}


def _tracker(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


class SignalConnector(_SignalConnector):
    """Lightning's signal handlers, except for the signals that ``STOP`` handles.

    Where SLURM requeues the job on a signal, Lightning handles that one.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            STOP.release(environment.requeue_signal)

    @staticmethod
    def _register_signal(signum: Any, handlers: Any) -> None:
        if signum not in STOP.handled:
            _SignalConnector._register_signal(signum, handlers)


def use_own_signals(trainer: Trainer) -> None:
    """Make a trainer leave the signals that ``STOP`` handles as they are."""
    trainer._signal_connector = SignalConnector(trainer)


@contextlib.contextmanager
def watching_processes(watch: Callable[[list[subprocess.Popen[bytes]]], None]) -> Iterator[None]:
    """Call ``watch`` with the processes that Lightning starts for a run.

    It replaces Lightning's own watch, which kills the first process without a message.
    """
    module: Any = subprocess_script
    observer = module._launch_process_observer
    module._launch_process_observer = watch
    try:
        yield
    finally:
        module._launch_process_observer = observer


class CompletedCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` that may complete the metrics by which it chooses checkpoints."""

    def complete(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        """Add what is missing to the metrics of a validation, in place."""
        raise NotImplementedError

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        metrics = super()._monitor_candidates(trainer)
        self.complete(trainer, metrics)
        return metrics


class DescribedBar(RichProgressBar):
    """Lightning's progress bar with a description of the epoch by a public method."""

    def describe_epoch(self, epoch: int) -> str:
        """Return the text before the bar of an epoch, which counts from 0."""
        raise NotImplementedError

    def _get_train_description(self, current_epoch: int) -> str:
        return self.describe_epoch(current_epoch)
