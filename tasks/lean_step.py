"""A training step that calls the hooks which somebody has, and no others.

Lightning asks for 23 hooks in a step, whoever has them. Each time it writes a line for a log that
nobody reads and a name for a profiler that does not run, which between two networks' worth of other
code costs a millisecond. Here the hooks of a run are looked up once.

Source: ``_TrainingEpochLoop.advance`` and ``_AutomaticOptimization`` of Lightning 2.6.6, whose
order of hooks, counters and arithmetic this keeps; tests/tasks/test_lean_step.py compares them. The
task's hooks are handed the optimiser itself, without the ``LightningOptimizer`` around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from tasks.training import Training

# What callbacks and the task are asked for in each step, beside what the task computes.
HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
OWN_STEPS = (Training.optimizer_step, LightningModule.optimizer_step)
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LeanStep:
    """Steps of one run, whose parts do not change any more.

    Args:
        loop: The run's epochs. Its trainer is one that ``serves`` says yes of.
    """

    def __init__(self, loop: _TrainingEpochLoop) -> None:
        self._loop = loop
        self._trainer: Any = loop.trainer
        self._task: Any = loop.trainer.lightning_module
        self._hooks = {name: _listeners(self._trainer, name) for name in HOOKS}
        owners = (self._task, self._trainer.datamodule)
        self._plain_transfer = not any(
            is_overridden(name, owner) for name in TRANSFER for owner in owners if owner is not None
        )

    @staticmethod
    def serves(trainer: Trainer) -> bool:
        """Whether a run has nothing that only Lightning's own step can do."""
        engine: Any = trainer
        task, precision = engine.lightning_module, engine.precision_plugin
        return (
            isinstance(engine.profiler, PassThroughProfiler)
            and type(engine.strategy) in (SingleDeviceStrategy, DDPStrategy)
            and type(precision) in (Precision, MixedPrecision)
            and getattr(precision, "scaler", None) is None
            and engine.accumulate_grad_batches == 1
            and task.automatic_optimization
            and not is_overridden("on_train_batch_start", task)  # which may end an epoch
            and type(task).optimizer_step in OWN_STEPS  # another may not step at all
            and getattr(engine.strategy, "_model_averager", None) is None
            and len(engine.optimizers) == 1
            and all(
                config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau
                for config in engine.lr_scheduler_configs
            )
        )

    def __call__(self, data_fetcher: Any) -> None:
        """Train on the next batch.

        Raises:
            StopIteration: There is none.
        """
        loop, connector = self._loop, self._trainer._logger_connector
        batches = loop.batch_progress
        loop.val_loop.restarting = False
        if self._trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        batch, _, _ = next(data_fetcher)
        batch_idx = loop.batch_idx + 1
        batches.is_last_batch = data_fetcher.done
        batch = self._on_device(batch)
        batches.increment_ready()
        connector.on_batch_start(batch)
        outputs: dict[str, Any] | None = None
        if batch is None:
            loop._warning_cache.warn("a loader gave None for a batch, which is skipped")
        else:
            self._call("on_train_batch_start", batch, batch_idx)
            batches.increment_started()
            outputs = self._optimize(batch, batch_idx)
        batches.increment_processed()
        self._schedule()
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        connector.on_batch_end()
        batches.increment_completed()
        connector.update_train_step_metrics()

    def _on_device(self, batch: Any) -> Any:
        strategy = self._trainer.strategy
        batch = strategy.precision_plugin.convert_input(batch)
        if self._plain_transfer:
            return move_data_to_device(batch, strategy.root_device)
        batch = self._task._on_before_batch_transfer(batch, dataloader_idx=0)
        return strategy.batch_to_device(batch, dataloader_idx=0)

    def _optimize(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A step of the optimiser, which asks for the gradients when it has begun.

        Returns:
            What the task's step returned; nothing where that was None, which has no gradients.
        """
        trainer, task, optimizer = self._trainer, self._task, self._trainer.optimizers[0]
        steps = self._loop.automatic_optimization.optim_progress.optimizer.step
        result = ClosureResult(None)

        def closure() -> Tensor | None:
            nonlocal result
            with torch.enable_grad():
                step = trainer.strategy.training_step
                output = self._named("training_step", step, batch, batch_idx)
                result = ClosureResult.from_training_step_output(output)
                self._differentiate(result.closure_loss, batch_idx)
            return result.loss

        steps.increment_ready()
        epoch = trainer.current_epoch
        self._named("optimizer_step", task.optimizer_step, epoch, batch_idx, optimizer, closure)
        steps.increment_completed()
        return {} if result.loss is None else result.asdict()

    def _differentiate(self, loss: Tensor | None, batch_idx: int) -> None:
        """Gradients of this batch, clipped."""
        trainer, task, optimizer = self._trainer, self._task, self._trainer.optimizers[0]
        strategy = trainer.strategy
        zeroed = self._loop.automatic_optimization.optim_progress.optimizer.zero_grad
        zeroed.increment_ready()
        self._call("on_before_zero_grad", optimizer)
        zeroed.increment_started()
        epoch, clear = trainer.current_epoch, task.optimizer_zero_grad
        self._named("optimizer_zero_grad", clear, epoch, batch_idx, optimizer)
        zeroed.increment_completed()
        if loss is not None:
            strategy.pre_backward(loss)
            self._call("on_before_backward", loss)
            self._named("backward", strategy.precision_plugin.backward, loss, task, optimizer)
            self._call("on_after_backward")
            strategy.post_backward(loss)
        self._call("on_before_optimizer_step", optimizer)
        self._named(
            "configure_gradient_clipping",
            task.configure_gradient_clipping,
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    def _schedule(self) -> None:
        progress = self._loop.scheduler_progress
        for config in self._trainer.lr_scheduler_configs:
            progress.increment_ready()
            self._named("lr_scheduler_step", self._task.lr_scheduler_step, config.scheduler, None)
            progress.increment_completed()

    def _call(self, hook: str, *arguments: Any) -> None:
        for listener in self._hooks[hook]:
            self._named(hook, listener, *arguments)

    def _named(
        self, hook: str, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a hook by its name, from which ``self.log`` knows what it may do."""
        task = self._task
        before, task._current_fx_name = task._current_fx_name, hook
        result = function(*arguments, **options)
        task._current_fx_name = before
        return result


def _listeners(trainer: Any, hook: str) -> list[Callable[..., None]]:
    """What somebody has under the name of a hook: the callbacks in their order, then the task."""
    task = trainer.lightning_module
    found: list[Callable[..., None]] = []
    for callback in trainer.callbacks:
        function = getattr(callback, hook)
        if getattr(function, "__func__", None) is not getattr(Callback, hook):
            found.append(_bound(function, trainer, task))
    own = getattr(task, hook)
    if getattr(own, "__func__", None) is not getattr(LightningModule, hook):
        found.append(own)
    return found


def _bound(function: Callable[..., None], trainer: Any, task: Any) -> Callable[..., None]:
    return lambda *arguments: function(trainer, task, *arguments)
