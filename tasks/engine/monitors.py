"""Callbacks that watch a run's metrics: best checkpoints, early stopping, the gradients' norm.

Lightning's ``ModelCheckpoint`` and ``EarlyStopping`` end a run that lacks the metric they watch.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from tasks.engine.lightning_private import CompletedCheckpoint

log_info = rank_zero_only(logging.getLogger(__name__).info)


def warn_absent(metric: str, effect: str) -> None:
    """Warn that a validation cannot give the metric that something watches."""
    # The warning is shown once for each place and text.
    rank_zero_warn(f"{metric} cannot be computed: this validation lacks the data for it; {effect}")


WORST = 1e30  # beyond every figure


class BestCheckpoint(CompletedCheckpoint):
    """The best checkpoint by a metric; without the metric the latest one."""

    @property
    def state_key(self) -> str:
        """The key of the base class, by which checkpoints know the state."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def complete(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        """Replace a missing metric by a number that makes the latest checkpoint the best one."""
        assert self.monitor is not None
        figure = metrics.get(self.monitor)
        if figure is None or not figure.isfinite():
            warn_absent(self.monitor, "best.ckpt is the latest checkpoint")
            # Worse than all figures and improving, so that the latest is the best.
            worst = WORST if self.mode == "min" else -WORST
            metrics[self.monitor] = torch.tensor(worst / (1 + trainer.global_step))


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


class TopCheckpoints(ModelCheckpoint):
    """The best checkpoints by a metric; a class of its own, since states are kept by class."""

    def __init__(self, folder: Path, metric: str, mode: str, count: int) -> None:
        name = metric.rpartition("/")[2]
        super().__init__(
            dirpath=folder, monitor=metric, mode=mode, save_top_k=count,
            filename=f"top_epoch_{{epoch:03d}}_{name}_{{{metric}:.4f}}",
            auto_insert_metric_name=False, enable_version_counter=False, save_weights_only=True,
        )  # fmt: skip

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
