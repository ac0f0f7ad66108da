"""Lightning's training loops with exact resuming and a validation after the last step.

Source: Lightning 2.6.6, whose own loops resume a run that ends by ``max_steps`` on the wrong batch,
or not at all, end a run between two validations with weights that nothing has been said of, and
divide the losses of an epoch's last step by more batches than it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.trainer.call import _call_strategy_hook

from tasks.engine.batches import batches_of_step


class MeanOfBatches(_AutomaticOptimization):
    """Steps of the optimiser, whose gradient is the mean of the batches accumulated for it."""

    def _training_step(self, kwargs: Any) -> ClosureResult:
        output = _call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        count = batches_of_step(self.trainer, kwargs["batch_idx"])
        return ClosureResult.from_training_step_output(output, count)


class EpochLoop(_TrainingEpochLoop):
    """An epoch, in which the last step of all is followed by a validation, whatever the interval.

    A validation that falls due while batches are accumulated comes after their step, so that each
    checkpoint lies between two steps.

    Attributes:
        save: Called once when the step of the present batch is logged, before any validation.
        stop: Raised when all is logged and validated that the present batch brings.
    """

    save: Callable[[], None] | None = None
    stop: BaseException | None = None

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = MeanOfBatches(trainer)

    @property
    def validation_follows(self) -> bool:
        """Whether a validation comes after the batch that was just trained on."""
        return self._should_check_val_fx(self.trainer.fit_loop._data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Save, validate and log, then end where the run was told to."""
        if self.save is not None:
            save, self.save = self.save, None
            save()
        super().on_advance_end(data_fetcher)
        if self.stop is not None:
            raise self.stop

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        ends = self._ends_training()
        if self._should_accumulate() and not ends:
            return False  # the step of the optimiser comes first
        if super()._should_check_val_fx(data_fetcher) or self._fell_due_within_the_step():
            return True
        return ends and bool(self.trainer.enable_validation)

    def _fell_due_within_the_step(self) -> bool:
        """Return True if an interval of validation ended at a batch that was accumulated."""
        trainer = self.trainer
        every = trainer.val_check_batch  # None by the clock
        if not isinstance(every, int) or not self._should_check_val_epoch():
            return False
        by_epoch = trainer.check_val_every_n_epoch is not None
        done = 1 + (self.batch_idx if by_epoch else self.total_batch_idx)
        before = done - 1 - self.batch_idx % trainer.accumulate_grad_batches
        return done // every > before // every

    def _ends_training(self) -> bool:
        trainer = self.trainer
        if _is_max_limit_reached(self.global_step, self.max_steps):
            return True
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            return True
        epochs = trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        return last_epoch and self._num_ready_batches_reached()


class FitLoop(_FitLoop):
    """Training, which goes on from a ``Position`` in one way for all kinds of ends."""

    @property
    def done(self) -> bool:
        """Whether all is done, a validation that was broken off included."""
        progress = self.epoch_loop.val_loop.batch_progress.total
        owed = self.restarting and progress.completed < progress.ready
        return not owed and super().done

    def run(self) -> None:
        """Train, and count alike for the test that follows where nothing was left to train."""
        super().run()
        self.epoch_loop._batches_that_stepped = self.epoch_loop.global_step
        epochs = self.epoch_progress.current
        epochs.completed = epochs.ready

    def _iteration_based_training(self) -> bool:
        # To Lightning a run with max_steps restarts within an epoch even where none was begun.
        return False


def exact_loops(trainer: Trainer) -> None:
    """Give a trainer the loops of this module in place of Lightning's own."""
    own = trainer.fit_loop
    loop = FitLoop(trainer, min_epochs=own.min_epochs, max_epochs=own.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, own.min_steps, own.max_steps)
    trainer.fit_loop = loop


@dataclass(frozen=True)
class Position:
    """Where in the data and the schedule a checkpoint was written.

    Attributes:
        step: Optimiser steps done.
        batches: Batches that each process has trained on, over all epochs.
        batches_per_epoch: The same in one epoch.
        world_size: Number of processes.
        validation_due: Whether a validation comes next.
    """

    step: int
    batches: int
    batches_per_epoch: int
    world_size: int
    validation_due: bool = False

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, which is how many are trained to their end."""
        return self.batches // self.batches_per_epoch

    @property
    def batch(self) -> int:
        """The next batch within its epoch."""
        return self.batches % self.batches_per_epoch

    def loops(self, fresh: Mapping[str, Any]) -> dict[str, Any]:
        """The state of ``FitLoop`` from which it goes on here.

        Which hook a checkpoint was written in shows in Lightning's counters, and it tells from them
        what is left to do; here they are set to one of the three states that it goes on from with
        the very next thing.

        Args:
            fresh: The state of a loop that has not begun.
        """
        state = dict(fresh)
        unfinished = self.validation_due or self.batch > 0
        epoch = (self.batches - 1) // self.batches_per_epoch if unfinished else self.epoch
        trained = self.batches - epoch * self.batches_per_epoch
        begun = epoch + unfinished
        state["epoch_progress"] = _progress(begun, begun, epoch, epoch)
        # Lightning counts a step, and with it begins the next batch, when a validation is over.
        between = unfinished and not self.validation_due
        total, completed = self.batches, self.batches - between
        batches = _progress(total, total, total, completed)
        batches["current"] = _tracker(trained, trained, trained, trained - between)
        ends_epoch = trained == self.batches_per_epoch
        state["epoch_loop.batch_progress"] = {**batches, "is_last_batch": ends_epoch}
        due = int(self.validation_due)
        validation = {**_progress(due, due, 0, 0), "is_last_batch": False}
        state["epoch_loop.val_loop.batch_progress"] = validation
        stepped = self.step - unfinished
        state["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
        steps = {"ready": self.step, "started": self.step, "completed": self.step}
        counted = {"total": steps, "current": steps}
        optimizer = {"optimizer": {"step": counted, "zero_grad": counted}}
        state["epoch_loop.automatic_optimization.optim_progress"] = optimizer
        state["epoch_loop.scheduler_progress"] = counted
        return state


def _progress(ready: int, started: int, processed: int, completed: int) -> dict[str, Any]:
    tracker = _tracker(ready, started, processed, completed)
    return {"total": tracker, "current": dict(tracker)}


def _tracker(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}
