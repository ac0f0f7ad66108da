"""The base of all tasks: training, evaluation, prediction and what checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL import Image
from torch import Tensor, nn
from torchmetrics import SumMetric

from backbones.checkpoints.adoption import adopt, convert
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import Remembering, check_arguments
from tasks.engine.batch_norm import share_statistics
from tasks.engine.batches import UNREADABLE, Batch, Row, batch_size, check_batch, is_spare
from tasks.engine.checkpoint_entries import (
    built_config,
    load_average,
    network_entries,
    weights_problem,
)
from tasks.engine.ema import WeightEMA, reported
from tasks.engine.ema_metrics import SecondJudgement, log_better
from tasks.engine.evaluation_loss import Summed
from tasks.engine.family import Direction, Family
from tasks.engine.gather import mean_over_processes, refuse_together
from tasks.engine.losses import is_logged, loss_problem, total_loss
from tasks.engine.optim import check_optimizer, learning_rate_factor, optimizer_rules
from tasks.engine.optimizing import check_training, optimizer_and_schedule
from tasks.engine.param_groups import schedule_rate

OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3}
SCHEDULE: dict[str, Any] = {"name": "cosine"}


class BaseTask(Remembering, LightningModule):
    """Train, evaluate and apply a model; ``tasks.engine.batches`` describes its batches.

    A family's task names its ``family`` and writes the methods from ``update_metrics`` to
    ``preview``. What it predicts (classes, numbers, ...) is its own: see ``take_targets``,
    ``targets_of``, ``target_state`` and ``check_targets``.

    Args:
        model: An ``nn.Module`` with ``loss(batch)`` and ``predict(batch)``.
        optimizer: ``name`` (see ``optimizer_names``), ``lr``, ``weight_decay``, what depends on
            the parameter (``parameter_rules``), and the optimiser's own options. What is left out
            is as in ``OPTIMIZER``.
        schedule: ``name`` and options of ``learning_rate_factor``; what is left out is as in
            ``SCHEDULE``.
        ema: Options of ``WeightEMA``, such as ``decay``, or None. With it the average is what
            validation and tests see and what loading a checkpoint gives, or with ``report="best"``
            whichever is better in a validation; training goes on from the weights themselves.

    Attributes:
        family: Of the task: its metrics, their directions, its modality.
        data: The datamodule that prepares inputs for ``predict``: by default that of the training.
        preview_images: Number of inputs that a run draws its predictions for.
        headline: The metrics that progress lines show.
        metric_stores: Attributes in which ``update_metrics`` keeps what it takes in.
        why_no_loss: Why validation logs no loss; empty where it does.
        latest_loss: Of the last training batch of this process; None before the first.
        class_figures: Metrics per class of the last evaluation; empty without classes.
    """

    family: ClassVar[Family]
    preview_images: int = 12
    headline: tuple[str, ...]
    metric_stores: tuple[str, ...]
    why_no_loss: str = ""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.data: Any = None
        self.optimizer_options = OPTIMIZER | dict(optimizer or {})
        self.schedule_options = SCHEDULE | dict(schedule or {})
        # Sums, since torchmetrics' mean drops its weights where it lets a NaN be seen; in double
        # precision, since pixels are many.
        self.loss_sum, self.loss_count = (
            SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2)
        )
        self._rules = optimizer_rules(model, self.optimizer_options)
        # Refuse wrong options here, before anything else is built.
        check_optimizer(self.optimizer_options)
        # The top rate is known once the batch that it is scaled to is.
        scaled = self.optimizer_options.get("reference_batch")
        top = math.inf if scaled else self.optimizer_options["lr"]
        learning_rate_factor(1, 1, top, **self.schedule_options)
        check_arguments(WeightEMA, ema or {}, "task.ema")
        self.ema = None if ema is None else WeightEMA(**ema)
        self._beside: SecondJudgement | None = None
        self.latest_loss: Tensor | None = None
        self.class_figures: list[Row] = []

    @property
    def monitor(self) -> str:
        """The logged metric that chooses the best checkpoint."""
        return f"val/{self.family.monitor}"

    @property
    def mode(self) -> Direction:
        """Return "max" if higher values of ``monitor`` are better, else "min"."""
        return self.family.direction(self.family.monitor)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All that ``compute_metrics`` may return."""
        return self.headline

    @property
    def metric_directions(self) -> dict[str, Direction]:
        """The direction of each metric, of the loss where there is one, and of ``monitor``."""
        names = [*self.metric_names, *([] if self.why_no_loss else ["loss"]), self.family.monitor]
        return {name: self.family.direction(name) for name in names}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser, and a schedule that moves at every step."""
        return optimizer_and_schedule(self)

    def check_training(self, strategy: Any, batch: int) -> None:
        """Refuse what task and trainer do not allow together; see ``optimizing.check_training``."""
        check_training(self, strategy, batch)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """Step the optimiser, then the average, before anything is saved."""
        super().optimizer_step(*args, **options)
        if self.trainer.world_size > 1:
            share_statistics(self.model, self.trainer.strategy.reduce)
        if self.ema is not None:
            self.ema.update(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sum the losses of a batch."""
        losses, total = total_loss(self.model, self.prepare_batch(batch))
        # A look at a CUDA scalar waits for the device, so there only every 20th step pays for it.
        if total.device.type == "cpu" or self.global_step % 20 == 0:
            refuse_together(loss_problem(total, self._trainer, self.global_step))
        self.latest_loss = total.detach()
        if not is_logged(self.trainer, self.global_step + 1, batch_idx):
            return total  # logging takes Lightning half a millisecond
        size = batch_size(batch)
        shown = {f"train/{name}": value.detach() for name, value in losses.items()}
        shown["train/loss"] = total.detach()
        if self.trainer.world_size > 1:
            shown = mean_over_processes(self.trainer.strategy, shown)
        self.latest_loss = loss = shown.pop("train/loss")
        rate = schedule_rate(self.trainer.optimizers[0].param_groups[0])
        self.log_dict({**shown, "train/lr": rate}, batch_size=size)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        return total

    def prepare_training(self, datamodule: Any) -> None:
        """Load what only training needs, before anything is trained; nothing by default.

        Args:
            datamodule: Of the training, set up.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Change a training batch on its device, before the loss; unchanged by default."""
        return batch

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Refuse a batch of another form, such as the pairs that torchvision's data sets give."""
        check_batch(batch, self.family)
        return batch

    @property
    def is_spare(self) -> bool:
        """True in a process beyond the number of examples, whose one example is another's."""
        return is_spare(self._trainer)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update metrics and loss with a batch, of the average as well if both are judged."""
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
        """Return the predictions that metrics see."""
        return self.model.predict(batch)

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics; swap the average in, or judge both in training."""
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
        """Log the metrics over the whole set, equal on all processes; swap the average out."""
        if self._beside is None:
            self._log_figures("val", self._figures())
        else:
            log_better(self, self._beside)
            self._beside = None
        if self.ema is not None:
            self.ema.take_out(self.model)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch as in validation."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        """Reset the metrics as in validation; the model keeps the average."""
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        """Log the metrics under "test/"."""
        self._log_figures("test", self._figures())

    def update_metrics(self, batch: Batch, predictions: Any) -> None:
        """Update the metrics with one batch."""
        raise NotImplementedError

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the metrics since the last reset, over all processes."""
        raise NotImplementedError

    def evaluation_loss(self, batch: Batch, predictions: Any) -> Summed:
        """Return the summed loss of a batch's predictions and their number; see ``why_no_loss``."""
        raise NotImplementedError

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        raise NotImplementedError

    def _figures(self) -> dict[str, Tensor]:
        figures = self.compute_metrics()
        if not self.why_no_loss:
            figures["loss"] = (self.loss_sum.compute() / self.loss_count.compute()).float()
        return figures

    def _log_figures(self, stage: str, figures: Mapping[str, Tensor]) -> None:
        for name, value in figures.items():
            self.log(f"{stage}/{name}", value, prog_bar=name in self.headline)

    @torch.no_grad()
    def predict(self, images: Any) -> list[Row]:
        """Predict inputs, prepared as in evaluation: of a task from ``tasks.load``.

        An input gets the prediction that it gets alone. Several threads may call at the same time.

        Args:
            images: Whatever the family's data modules take. Of images: one or a list of them, as
                paths (of a folder, all its images), PIL images, arrays (H, W, 3), tensors
                (3, H, W), grey ones (H, W), or batches of these; uint8, or floats from 0 to 1.

        Returns:
            A dict for each input, as in predictions.json; see the tasks' ``describe``.
        """
        if self.data is None:
            self.data = self._usual_data()
        self.eval()
        data = self.data.with_predict_inputs(images)
        data.num_workers = 0  # starting others takes longer than a few inputs
        rows: list[Row] = []
        with reported(self.ema, self.model):
            for batch in data.predict_dataloader():
                for broken in batch.pop(UNREADABLE, ()):
                    raise ValueError(broken.reason)
                placed = self.transfer_batch_to_device(batch, self.device, 0)
                rows += self.describe(placed, data)
        return rows

    def _usual_data(self) -> Any:
        """Build a datamodule for a task that was trained without one."""
        from tasks.engine.loading import usual_datamodule

        return usual_datamodule(self)

    def setup(self, stage: str) -> None:
        """Keep the trainer's datamodule, if it is one of ours, to predict with."""
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "with_predict_inputs"):
            self.data = data

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Row]:
        """Predict a batch of the trainer's datamodule; arrays go to files of the run."""
        trainer: Any = self.trainer
        if self.is_spare:
            return []
        broken = batch.pop(UNREADABLE, ())
        described = self.describe(batch, trainer.datamodule) if batch else []
        rows = [self.filed(row) for row in described]
        return rows + [{"image": one.name, UNREADABLE: one.reason} for one in broken]

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return predictions as plain values, one dict per input with its name as ``image``."""
        raise NotImplementedError

    def filed(self, row: Row) -> Row:
        """Return a row of ``describe`` as json takes it."""
        return row

    def answer(self, row: Row) -> str:
        """Return a row of ``describe`` in words, for the terminal."""
        raise NotImplementedError

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions as other tools read them, beside predictions.json."""

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the predictions for a batch of the datamodule."""
        raise NotImplementedError

    def take_targets(self, datamodule: Any) -> None:
        """Read from the datamodule what the constructor does not take; nothing by default."""

    def target_arguments(self) -> dict[str, Any]:
        """Return what ``predict_only`` of a datamodule takes; see ``targets_of``."""
        return {}

    def target_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that describe the targets."""
        return {}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return what ``predict_only`` of a datamodule takes; None if the file does not say."""
        return {}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of other targets; nothing to compare by default."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add targets, the network's options, and the average where loaders look first.

        Raises:
            ValueError: Weights that are not finite, of this process or another one.
        """
        refuse_together(weights_problem(checkpoint.get("state_dict", {})))
        checkpoint |= network_entries(self) | self.target_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse one of other targets, and restore the average."""
        self.check_targets(Checkpoint("the checkpoint", checkpoint))
        load_average(self.ema, checkpoint, self.model)

    def config(self) -> dict[str, Any]:
        """Return what builds this task again; empty if its parts are not all of this project."""
        return built_config(self)

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load the model's weights from a checkpoint of this task.

        A classifier takes files of timm's and the authors' as well.

        Args:
            checkpoint: A file, or what it holds.
            converted: Resize its tables to this network's sizes, to start a training from it.

        Raises:
            ValueError: Weights of another model or for other targets; what differs is listed.
        """
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        self.check_targets(opened)
        adopt(self.model, convert(opened, self.model.backbone) if converted else opened)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **options: Any
    ) -> Self:
        """Build a task from a checkpoint of its kind, to train on or to predict with.

        Args:
            checkpoint_path: The file, or a run folder.
            map_location: Where to put the task.
            **options: Arguments of the class, such as ``model``, for a file that does not say how
                its task was built; and Lightning's own. Loading is always strict and executes
                nothing.

        Raises:
            ValueError: A file of another task, or one that does not say how it was built.
        """
        from tasks.engine.loading import task_from_file

        return task_from_file(cls, checkpoint_path, options).to(map_location)
