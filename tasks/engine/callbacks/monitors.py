"""Callbacks that watch a run: best checkpoints, early stopping, its time, the gradients' norm.

Lightning's ``ModelCheckpoint`` and ``EarlyStopping`` end a run that lacks the metric they watch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from tasks.engine.loops.lightning_private import CompletedCheckpoint

log_info = rank_zero_only(logging.getLogger(__name__).info)


def warn_absent(metric: str, effect: str) -> None:
    """Warn that a validation cannot give the metric that something watches."""
    # The warning is shown once for each place and text.
    rank_zero_warn(f"{metric} cannot be computed: this validation lacks the data for it; {effect}")


WORST = 1e30  # beyond every figure
LOSS = "val/loss"
ABSENT = torch.tensor(float("inf"))  # of a validation without a loss


class RankedCheckpoint(ModelCheckpoint):
    """Checkpoints by a metric; of equal figures the one of the lower loss is better.

    Without a loss it is the earlier one.

    Attributes:
        losses: Loss of each file of ``best_k_models``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: dict[str, Tensor] = {}
        self._latest = ABSENT

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True for a better figure, or an equal one with a lower loss."""
        self._rank()
        better = super().check_monitor_top_k(trainer, current)
        worst, loss = self.kth_best_model_path, trainer.callback_metrics.get(LOSS, ABSENT)
        if not better and current is not None:
            equal = bool(current == self.best_k_models[worst] and loss < self.losses[worst])
            better = trainer.strategy.reduce_boolean_decision(equal)
        if better:
            self.losses.pop(worst, None)
            self._latest = loss.clone()
        return better

    def _rank(self) -> None:
        """Note the loss of the latest file; of equal figures the highest loss is replaced first."""
        self.losses = {path: self.losses.get(path, self._latest) for path in self.best_k_models}
        if self.losses and len(self.losses) == self.save_top_k:
            self.kth_best_model_path = max(self.losses, key=self._error)

    def _error(self, path: str) -> tuple[float, float]:
        score = float(self.best_k_models[path])
        return (score if self.mode == "min" else -score), float(self.losses[path])

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state and the losses."""
        self._rank()
        return super().state_dict() | {"best_k_second_scores": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of earlier runs without losses."""
        super().load_state_dict(state_dict)
        self.losses, self._latest = dict(state_dict.get("best_k_second_scores", {})), ABSENT
        self._rank()


class BestCheckpoint(RankedCheckpoint, CompletedCheckpoint):
    """The best checkpoint by a metric; the latest one until a validation has the metric."""

    @property
    def state_key(self) -> str:
        """The key of the base class, by which checkpoints know the state."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def complete(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        """Replace a missing metric by a number that makes the latest checkpoint the best one."""
        assert self.monitor is not None
        figure = metrics.get(self.monitor)
        if figure is None or not figure.isfinite():
            # Worse than all figures and improving, so that the latest is the best.
            worst = WORST if self.mode == "min" else -WORST
            latest = metrics[self.monitor] = torch.tensor(worst / (1 + trainer.global_step))
            best = self.best_model_score
            stays = best is not None and (best < latest) == (self.mode == "min")
            content = "the best of those before" if stays else "the latest checkpoint"
            warn_absent(self.monitor, f"best.ckpt is {content}")


class StopEarly(EarlyStopping):
    """Lightning's early stopping, judged after every validation, that says why it stopped."""

    def __init__(self, metric: str, patience: int, mode: str, min_delta: float) -> None:
        # After validation and not at the epoch's end: by then the last checkpoint is written,
        # which has to know how long there was no improvement.
        super().__init__(
            metric, min_delta=min_delta, patience=patience, mode=mode,
            check_on_train_epoch_end=False, check_finite=False, strict=False,
        )  # fmt: skip

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge a validation that has the metric."""
        if not is_known(trainer, self.monitor):
            warn_absent(self.monitor, "training does not stop early by it")
            return
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why, if it was this that ended training."""
        if self.stopped_epoch:
            best = float(self.best_score)
            log_info(
                f"Stopped early after epoch {self.stopped_epoch + 1}: {self.monitor} was best at "
                f"{best:.4g} and has not improved in {self.wait_count} validations"
            )


class TimeLimit(Timer):
    """Lightning's end of a training by the clock, between two steps of the optimiser.

    The time counts over all stops of a run, in training and its validations.

    Args:
        duration: As of Lightning's Timer, "DD:HH:MM:SS" or a dictionary.

    Attributes:
        is_over: True if time has ended the training.
    """

    def __init__(self, duration: str | dict[str, int]) -> None:
        super().__init__(duration, verbose=False)
        self.is_over = False

    @property
    def state_key(self) -> str:
        """The key of the base class, by which checkpoints know the state."""
        return Timer.__qualname__

    def trained_share(self, trainer: Trainer) -> float | None:
        """Return the trained share of the schedule where time ended the run; None otherwise."""
        share = trainer.global_step / trainer.estimated_stepping_batches
        return share if self.is_over and share < 1 else None

    def on_fit_start(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        """End a resumed training whose time was over before."""
        super().on_fit_start(trainer)
        self.is_over = trainer.should_stop

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End training after a step of the optimiser, before the last checkpoint is written."""
        if trainer.is_last_batch or not (batch_idx + 1) % trainer.accumulate_grad_batches:
            super().on_train_batch_end(trainer)
            self.is_over = trainer.should_stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log where time ended the training."""
        super().on_train_end(trainer, pl_module)
        share = self.trained_share(trainer)
        if share is not None:
            log_info(
                f"trainer.max_time ended the training after step {trainer.global_step}, at "
                f"{share:.0%} of its schedule; resume=true with a larger one continues it"
            )


class TopCheckpoints(RankedCheckpoint):
    """The best checkpoints by a metric; a class of its own, since states are kept by class."""

    def __init__(self, folder: Path, metric: str, mode: str, count: int) -> None:
        name = metric.rpartition("/")[2]
        super().__init__(
            dirpath=folder, monitor=metric, mode=mode, save_top_k=count,
            filename=f"top_epoch_{{epoch:03d}}_step_{{step}}_{name}_{{{metric}:.4f}}",
            auto_insert_metric_name=False, enable_version_counter=False, save_weights_only=True,
        )  # fmt: skip
        self._beyond: list[str] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the best of a run that kept more."""
        super().load_state_dict(state_dict)
        scores = self.best_k_models
        ranked = sorted(scores, key=self._error)
        paths, self._beyond = ranked[: self.save_top_k], ranked[self.save_top_k :]
        self.best_k_models = {path: scores[path] for path in paths}
        if self._beyond:
            self.kth_best_model_path, self.kth_value = paths[-1], scores[paths[-1]]
            self._rank()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the checkpoints that a run kept beyond today's number."""
        super().on_train_start(trainer, pl_module)
        for path in self._beyond:
            trainer.strategy.remove_checkpoint(path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the last validation has the metric."""
        if is_known(trainer, self.monitor):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the validation has the metric."""
        if is_known(trainer, self.monitor):
            super().on_validation_end(trainer, pl_module)


def is_known(trainer: Trainer, metric: str | None) -> bool:
    """Return True if the last validation has a metric."""
    figure = trainer.callback_metrics.get(str(metric))
    return figure is not None and bool(figure.isfinite())


class GradientNorm(Callback):
    """Log the norm of all gradients, before they are clipped, as ``train/gradient_norm``.

    Args:
        every: Steps between two entries.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Gradients are whole here, unscaled and not yet clipped."""
        if trainer.global_step % self.every:
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).float().square().sum()
        if isinstance(trainer.strategy, FSDPStrategy):  # each process has a part
            squares = trainer.strategy.reduce(squares, reduce_op="sum")
        # Not by the module's log, which would repeat the value at the steps between two entries.
        for logger in trainer.loggers:
            logger.log_metrics(
                {"train/gradient_norm": float(squares.sqrt())}, step=trainer.global_step
            )
