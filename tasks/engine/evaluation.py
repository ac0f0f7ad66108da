"""What all tasks do in validation and tests: metrics and loss of the weights or their average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric

from tasks.engine.batches import Batch
from tasks.engine.ema import WeightEMA
from tasks.engine.ema_metrics import SecondJudgement
from tasks.engine.evaluation_loss import Summed


class Evaluation(LightningModule):
    """The part of a ``BaseTask`` that evaluates; the attributes are the task's own."""

    monitor: str
    headline: tuple[str, ...]
    metric_stores: tuple[str, ...]
    why_no_loss: str
    model: Any
    ema: WeightEMA | None
    loss_sum: Metric
    loss_count: Metric
    _beside: SecondJudgement | None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All that ``compute_metrics`` may give."""
        return self.headline

    @property
    def is_spare(self) -> bool:
        """True in a process beyond the number of images, which has one that is not its own."""
        trainer: Any = self._trainer
        if trainer is None or trainer.world_size == 1:
            return False
        stage = "predict" if trainer.predicting else "test" if trainer.testing else "val"
        loader = getattr(trainer, f"{stage}_dataloaders")
        return bool(trainer.global_rank >= len(loader.dataset))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Hand the predictions of a batch to the task's metric, and take their loss."""
        if self.is_spare:
            return
        self._judge(batch)
        if self._beside is not None:
            assert self.ema is not None
            with self._beside.taken_in(self), self.ema.worn_by(self.model):
                self._judge(batch)

    def _judge(self, batch: Batch) -> None:
        predictions = self.evaluated(batch)
        self.update_metrics(batch, predictions)
        if not self.why_no_loss:
            loss, count = self.evaluation_loss(batch, predictions)
            self.loss_sum.update(loss)
            self.loss_count.update(count)

    def evaluated(self, batch: Batch) -> Any:
        """The predictions that metrics see."""
        return self.model.predict(batch)

    def on_validation_epoch_start(self) -> None:
        """Forget the last epoch's predictions; in training, turn to the average or judge both."""
        self.reset_metrics()
        self.loss_sum.reset()
        self.loss_count.reset()
        self._beside = None
        if self.ema is None:
            return
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if self.ema.report == "best" and self.ema.tensors and fitting:
            self._beside = SecondJudgement(self, (*self.metric_stores, "loss_sum", "loss_count"))
        elif self.ema.is_reported:
            self.ema.put_into(self.model)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over the whole set, equal on all processes; turn back to the weights."""
        if self._beside is None:
            self._log_metrics("val")
        else:
            self._log_better(self._beside)
            self._beside = None
        if self.ema is not None:
            self.ema.take_out(self.model)

    def _log_better(self, beside: SecondJudgement) -> None:
        assert self.ema is not None
        name = self.monitor.partition("/")[2]
        own = self._figures()
        with beside.taken_in(self):
            other = self._figures()
        self.ema.is_reported = bool(other[name] >= own[name])
        self._log_figures("val", other if self.ema.is_reported else own)
        self.log(f"{self.monitor}_weights", own[name])
        self.log(f"{self.monitor}_ema", other[name])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As in validation."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        """As in validation; the model keeps the average."""
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        """As in validation, under "test/"."""
        self._log_metrics("test")

    def update_metrics(self, batch: Batch, predictions: Any) -> None:
        """Take in one batch."""
        raise NotImplementedError

    def compute_metrics(self) -> dict[str, Tensor]:
        """Metrics over everything taken in since the last reset, by all processes together."""
        raise NotImplementedError

    def evaluation_loss(self, batch: Batch, predictions: Any) -> Summed:
        """The loss of a batch's predictions, summed, and over how many; see ``why_no_loss``."""
        raise NotImplementedError

    def reset_metrics(self) -> None:
        """Start afresh."""
        raise NotImplementedError

    def _log_metrics(self, stage: str) -> None:
        self._log_figures(stage, self._figures())

    def _figures(self) -> dict[str, Tensor]:
        """Metrics and loss over what was taken in since the last reset."""
        figures = self.compute_metrics()
        if not self.why_no_loss:
            figures["loss"] = (self.loss_sum.compute() / self.loss_count.compute()).float()
        return figures

    def _log_figures(self, stage: str, figures: Mapping[str, Tensor]) -> None:
        for name, value in figures.items():
            self.log(f"{stage}/{name}", value, prog_bar=name in self.headline)
