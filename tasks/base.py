"""What all tasks share: summing and logging losses, refusing NaN, optimiser and schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import SumMetric

from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import check_arguments
from tasks.batch_norm import share_statistics
from tasks.classes import check_classes
from tasks.ema import WeightEMA
from tasks.evaluation_loss import Summed
from tasks.gather import refuse_together
from tasks.judgement import SecondJudgement
from tasks.optim import (
    build_optimizer,
    check_optimizer,
    learning_rate_factor,
    optimizer_rules,
    scaled_lr,
)
from tasks.param_groups import schedule_rate

say = rank_zero_only(logging.getLogger(__name__).info)

# Where a checkpoint keeps the average: if it is what a run reports, and if it is not.
EMA, UNREPORTED = "state_dict_ema", "state_dict_ema_not_reported"
Batch = dict[str, Any]
Row = dict[str, Any]


class Model(Protocol):
    """What a head makes of a backbone: the only model a task sees."""

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars; those with "loss" in the name are summed, the others only logged."""

    def predict(self, batch: Batch) -> Any:
        """Predictions in the form that the task's metric takes."""


class BaseTask(LightningModule):
    """Train a model on dict batches.

    Args:
        model: An ``nn.Module`` with ``loss(batch)`` and ``predict(batch)``.
        class_names: Names of the classes, in label order.
        optimizer: ``name`` ("adamw", "sgd" or "lamb"), ``lr``, ``weight_decay``, what depends on
            the parameter (``parameter_rules``), and the optimiser's own options.
        schedule: ``name`` ("cosine", "multistep", "poly" or "constant") and its options.
        ema: Options of ``WeightEMA``, such as ``decay``, or None. With it the average is what
            validation and tests see and what loading a checkpoint gives, or with ``report="best"``
            whichever is better in a validation; training goes on from the weights themselves.

    Attributes:
        monitor: The metric, higher is better, that chooses the best checkpoint.
        category_ids: What the data's files call each label, if not by itself; kept in checkpoints.
        data: The datamodule that prepares images for ``predict``.
        preview_images: How many images a run draws its predictions for.
        headline: The metrics that progress lines show.
        metric_stores: Attributes in which ``update_metrics`` keeps what it takes in.
        why_no_loss: Why validation logs no loss; empty where it does.
        latest_loss: Of the last training batch of this process; None before the first.
        class_figures: Of the last evaluation, the metrics of each class; empty where a task has
            none.
    """

    monitor: str
    preview_images: int = 12
    headline: tuple[str, ...]
    metric_stores: tuple[str, ...]
    why_no_loss: str = ""

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        optimizer: Mapping[str, Any],
        schedule: Mapping[str, Any],
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.class_names = tuple(class_names)
        self.category_ids: tuple[int, ...] = ()
        self.data: Any = None
        self.optimizer_options = dict(optimizer)
        self.schedule_options = dict(schedule)
        # Sums, since torchmetrics' mean drops its weights where it lets a NaN be seen; in double
        # precision, since pixels are many.
        self.loss_sum, self.loss_count = (
            SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2)
        )
        self._rules = optimizer_rules(model, self.optimizer_options)
        # Bad options are to be refused here, not when everything else is up and running.
        check_optimizer(self.optimizer_options)
        learning_rate_factor(1, 1, self.optimizer_options["lr"], **self.schedule_options)
        check_arguments(WeightEMA, ema or {}, "task.ema")
        self.ema = None if ema is None else WeightEMA(**ema)
        self._beside: SecondJudgement | None = None
        self.latest_loss: Tensor | None = None
        self.class_figures: list[Row] = []

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All that ``compute_metrics`` may give."""
        return self.headline

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser, and a schedule that moves at every step."""
        options = dict(self.optimizer_options)
        if options["name"] == "adamw" and not options.keys() & {"fused", "foreach"}:
            # On a CPU torch loops over the parameters unless asked, which takes three times as
            # long. Lightning clips no gradients of a fused optimiser in mixed precision.
            options["fused"] = self.device.type == "cpu" and self.trainer.precision == "32-true"
        if self.ema is not None and isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError(
                "sharded weights have no average: pass task.ema=null, or trainer=ddp to keep it"
            )
        batch = self._images_per_step() if options.get("reference_batch") else None
        optimizer = build_optimizer(self.model, self._rules, batch, **options)
        self.trainer.fit_loop.setup_data()  # without an end by epochs the estimate does not ask it
        steps = int(self.trainer.estimated_stepping_batches)
        slow = None if self.ema is None else self.ema.slow_for(steps)
        if slow is not None:
            say(slow)
        batches, accumulated = (
            self.trainer.num_training_batches,
            self.trainer.accumulate_grad_batches,
        )
        factor = learning_rate_factor(
            steps,
            math.ceil(batches / accumulated),
            scaled_lr(options["lr"], options.get("reference_batch"), batch or 1),
            **self.schedule_options,
        )
        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _images_per_step(self) -> int:
        trainer: Any = self.trainer
        images = trainer.datamodule.batch_size * trainer.world_size
        return int(images * trainer.accumulate_grad_batches)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """A step of the optimiser, then one of the average: before anything is saved."""
        super().optimizer_step(*args, **options)
        if self.trainer.world_size > 1:
            share_statistics(self.model, self.trainer.strategy.reduce)
        if self.ema is not None:
            self.ema.update(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sum the losses of a batch."""
        try:
            losses = self.model.loss(self.prepare_batch(batch))
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                "a batch norm of this model has one value a channel to normalise by, with which "
                f"nothing trains: the batch is of {batch_size(batch)}; pass data.batch_size=2 or "
                "more, or to UperNet head.group_norm=true"
            ) from error
        total = torch.stack([value for name, value in losses.items() if "loss" in name]).sum()
        self._refuse_nan(total)
        self.latest_loss = total.detach()
        if not self._is_shown(batch_idx):
            return total  # Lightning takes half a millisecond to log what nobody would read
        size = batch_size(batch)
        shown = {f"train/{name}": value.detach() for name, value in losses.items()}
        shown["train/loss"] = total.detach()
        if self.trainer.world_size > 1:
            shown = self._mean_over_processes(shown)
        self.latest_loss = loss = shown.pop("train/loss")
        rate = schedule_rate(self.trainer.optimizers[0].param_groups[0])
        self.log_dict({**shown, "train/lr": rate}, batch_size=size)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        return total

    def _is_shown(self, batch_idx: int) -> bool:
        """Whether the losses of a batch are written down, or looked at when it is over.

        Other batches are not logged and need not wait for each other's losses; what progress shows
        of them is ``latest_loss``. All processes must come to the same answer.
        """
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        if every and (self.global_step + 1) % every == 0:
            return True
        if (
            batch_idx + 1 == trainer.num_training_batches
            or self.global_step + 1 == trainer.max_steps
        ):
            return True
        validated = trainer.val_check_batch  # None where validation goes by the clock
        return validated is None or (batch_idx + 1) % validated == 0

    def _mean_over_processes(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack([value.float() for value in values.values()])
        means = self.trainer.strategy.reduce(stacked, reduce_op="mean")
        return dict(zip(values, means.unbind(), strict=True))

    def prepare_training(self, datamodule: Any) -> None:
        """Load what only training needs, before anything is trained; nothing by default.

        Args:
            datamodule: Of the training, set up.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Change a training batch on its device, before the loss; nothing by default."""
        return batch

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Hand the predictions of a batch to the task's metric, and take their loss."""
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the names of the classes, and the average where loaders of weights look first."""
        checkpoint["class_names"] = list(self.class_names)
        checkpoint["category_ids"] = list(self.category_ids)
        if self.ema is not None and self.ema.tensors:
            state = self.ema.state_dict()
            tensors = {f"model.{key}": value for key, value in state["tensors"].items()}
            # Under the first name loaders of weights find it, whoever wrote them.
            place = EMA if self.ema.is_reported else UNREPORTED
            checkpoint |= {place: tensors, "ema_steps": state["steps"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse one of other classes, and take over the average."""
        check_classes(checkpoint, self.class_names, "the checkpoint")
        place = EMA if EMA in checkpoint else UNREPORTED
        if self.ema is not None and place in checkpoint:
            self.ema.is_reported = place == EMA
            tensors = checkpoint[place]
            tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
            state = {"tensors": tensors, "steps": checkpoint["ema_steps"]}
            self.ema.load_state_dict(state, self.model)

    def load_weights(self, checkpoint: Checkpoint | str | Path) -> None:
        """Load the model's weights from a checkpoint of this task.

        A classifier takes files of timm's and the authors' as well.

        Args:
            checkpoint: A file, or what it holds.

        Raises:
            ValueError: Weights of another model or for other classes; what differs is listed.
        """
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        check_classes(opened.values, self.class_names, opened.path)
        adopt(self.model, opened)

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

    @torch.no_grad()
    def predict(self, images: Any) -> list[Row]:
        """Predictions for images, prepared as in evaluation: of a task from ``tasks.load``.

        Args:
            images: One image or a list of them: paths (of a folder, all its images), PIL images,
                uint8 arrays (H, W, 3) of RGB values or uint8 tensors (3, H, W).

        Returns:
            A dict for each image, as in predictions.json; see the tasks' ``describe``.
        """
        if self.data is None:
            raise ValueError("predict() is for tasks from tasks.load(<run folder>)")
        self.eval()
        self.data.take(images)
        rows: list[Row] = []
        for batch in self.data.predict_dataloader():
            placed = self.transfer_batch_to_device(batch, self.device, 0)
            rows += self.describe(placed, self.data)
        return rows

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Row]:
        """Predictions of a batch of the trainer's datamodule; arrays go to files of the run."""
        trainer: Any = self.trainer
        return [self.filed(row) for row in self.describe(batch, trainer.datamodule)]

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Predictions as plain values, one dict per image."""
        raise NotImplementedError

    def filed(self, row: Row) -> Row:
        """A row of ``describe`` as json takes it."""
        return row

    def answer(self, row: Row) -> str:
        """A row of ``describe`` in words, for the terminal."""
        raise NotImplementedError

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions as other tools read them, beside predictions.json."""

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the predictions for a batch of the datamodule, which says what drawing has to know.

        That is ``normalisation``, the mean and deviation of its images, or ``background``, the
        class that is not tinted.
        """
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

    def _refuse_nan(self, loss: Tensor) -> None:
        # A look at a CUDA scalar waits for the device, so there only every 20th step pays for it.
        if loss.device.type != "cpu" and self.global_step % 20:
            return
        problem = None
        if not torch.isfinite(loss):
            problem = (
                f"the loss is {loss.item()} at step {self.global_step}; training stops here, the "
                "last checkpoint stays. Lower optimizer.lr, lengthen schedule.warmup, or set "
                "trainer.gradient_clip_val"
            )
        refuse_together(problem)


def batch_size(batch: Batch) -> int:
    """Images in a batch of ours ("image") or of the MM toolkits ("inputs")."""
    return len(batch["image"] if "image" in batch else batch["inputs"])
