"""Base of all tasks: training, evaluation, prediction and checkpoints."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL import Image
from torch import Tensor, nn
from torchmetrics import SumMetric

from backbones.base import Backbone
from backbones.checkpoints.equations import FINGERPRINT
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import Remembering, check_arguments
from tasks.engine.answers import SampleAnswers, gather_answers
from tasks.engine.batches import UNREADABLE, Batch, Row, Summed, batch_size, check_batch, is_spare
from tasks.engine.checkpoints.entries import (
    built_config,
    fingerprint_entry,
    load_average,
    network_entries,
    weights_problem,
)
from tasks.engine.family import Direction, Family
from tasks.engine.loops.process_exchange import mean_over_processes, refuse_together
from tasks.engine.losses import is_logged, loss_problem, total_loss
from tasks.engine.metric_states import kept_states
from tasks.engine.optimisation.optimizer import (
    check_optimizer,
    learning_rate_factor,
    optimizer_rules,
)
from tasks.engine.optimisation.param_groups import STORED_RULES, schedule_rate, stored_rules
from tasks.engine.optimisation.task_optimizer import check_training, optimizer_and_schedule

if TYPE_CHECKING:
    from tasks.engine.callbacks.ema import WeightEMA
    from tasks.engine.callbacks.ema_metrics import SecondMetrics
    from tasks.engine.run_folder.predictions import OutputFiles

OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3}
SCHEDULE: dict[str, Any] = {"name": "cosine"}


class BaseTask(Remembering, LightningModule):
    """Training, evaluation and prediction of a model; ``tasks.engine.batches`` describes batches.

    A family's task sets ``family`` and defines the methods from ``update_metrics`` to ``preview``.
    It defines its targets (classes, numbers, ...) by ``take_targets``, ``targets_of``,
    ``target_state`` and ``check_targets``.

    Args:
        model: An ``nn.Module`` with ``loss(batch)`` and ``predict(batch)``.
        optimizer: ``name`` (see ``optimizer_names``), ``lr``, ``weight_decay``, rules for groups of
            parameters (``parameter_rules``), and the optimiser's own options. Defaults are in
            ``OPTIMIZER``.
        schedule: ``name`` and options of ``learning_rate_factor``; defaults are in ``SCHEDULE``.
        ema: Options of ``WeightEMA``, such as ``decay``, or None. Validation, tests and loaded
            checkpoints then use the average, or with ``report="best"`` the better of weights and
            average. Training continues from the weights.

    Attributes:
        family: Family of the task: its metrics, their directions, its modality.
        data: Datamodule that prepares inputs for ``predict``; by default that of the training.
        source: Run folder or checkpoint that ``tasks.load`` opened.
        preview_images: Number of inputs with predictions that a run draws.
        headline: Metrics shown in progress lines.
        metric_stores: Names of the attributes that ``update_metrics`` updates.
        why_no_loss: Reason why validation logs no loss; empty if it logs one.
        latest_loss: Training loss of this process, the mean over the batches of the last step so
            far; None before the first.
        class_figures: Metrics per class, or per part of the output, of the last evaluation.
        figures_file: Name of the file of ``class_figures``.
        sample_answers: What the last test found for each sample; None without a test.
    """

    family: ClassVar[Family]
    preview_images: int = 12
    headline: tuple[str, ...]
    metric_stores: tuple[str, ...]
    why_no_loss: str = ""
    figures_file: str = "classes.csv"

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
        self.source: Path | None = None
        self.optimizer_options = OPTIMIZER | dict(optimizer or {})
        self.schedule_options = SCHEDULE | dict(schedule or {})
        # Sums, since torchmetrics' mean ignores its weights if NaN is allowed. Double precision,
        # since pixels are many.
        self.loss_sum, self.loss_count = (
            SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2)
        )
        self._rules = optimizer_rules(model, self.optimizer_options)
        # Refuse wrong options here, before anything else is built.
        check_optimizer(self.optimizer_options)
        # A rate scaled by the batch size is unknown until the batch size is.
        scaled = self.optimizer_options.get("reference_batch")
        top = math.inf if scaled else self.optimizer_options["lr"]
        learning_rate_factor(1, 1, top, **self.schedule_options)
        self.ema: WeightEMA | None = None
        if ema is not None:
            from tasks.engine.callbacks.ema import WeightEMA

            check_arguments(WeightEMA, ema, "task.ema")
            self.ema = WeightEMA(**ema)
        self._second_metrics: SecondMetrics | None = None
        self.latest_loss: Tensor | None = None
        self._losses_of_step: list[dict[str, Tensor]] = []
        self.class_figures: list[Row] = []
        self.sample_answers: SampleAnswers | None = None
        self._sample_values: list[Tensor] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert or move the weights; the metrics move only."""
        with kept_states(self):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def monitor(self) -> str:
        """Return the logged metric that selects the best checkpoint."""
        return f"val/{self.family.monitor}"

    @property
    def mode(self) -> Direction:
        """Return "max" if higher values of ``monitor`` are better, else "min"."""
        return self.family.direction(self.family.monitor)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics that ``compute_metrics`` may return."""
        return self.headline

    @property
    def metric_directions(self) -> dict[str, Direction]:
        """Return the direction of each metric, of the loss, if any, and of ``monitor``."""
        names = [*self.metric_names, *([] if self.why_no_loss else ["loss"]), self.family.monitor]
        return {name: self.family.direction(name) for name in names}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser, and a schedule that is updated at every step."""
        return optimizer_and_schedule(self)

    def schedule_factor(
        self, steps: int, steps_per_epoch: int, lr: float
    ) -> Callable[[int], float]:
        """Return the rate of each step over the top rate ``lr``."""
        return learning_rate_factor(steps, steps_per_epoch, lr, **self.schedule_options)

    def shown_figures(self, mode: str) -> list[Row]:
        """Return the rows of ``class_figures`` that a run prints; after a training none."""
        return [] if mode == "fit" else self.class_figures

    def summary_facts(self) -> dict[str, Any]:
        """Return what summary.json keeps of the last evaluation besides its metrics."""
        return {}

    def check_training(self, strategy: Any, batch: int) -> None:
        """Refuse conflicting options of task and trainer; see ``optimizing.check_training``."""
        check_training(self, strategy, batch)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """Step the optimiser, then update the average, before anything is saved."""
        super().optimizer_step(*args, **options)
        if self.trainer.world_size > 1:
            from tasks.engine.loops.batch_norm import share_statistics

            share_statistics(self.model, self.trainer.strategy.reduce)
        if self.ema is not None:
            self.ema.update(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the summed losses of a batch, and log them."""
        losses, total = total_loss(self.model, self.prepare_batch(batch))
        # Reading a CUDA scalar waits for the device, so only every 20th step does.
        if total.device.type == "cpu" or self.global_step % 20 == 0:
            refuse_together(loss_problem(total, self._trainer, self.global_step, batch))
        figures = {f"train/{name}": value.detach() for name, value in losses.items()}
        figures["train/loss"] = total.detach()
        figures = self._mean_of_step(figures, batch_idx)
        self.latest_loss = figures["train/loss"]
        if not is_logged(self.trainer, self.global_step + 1, batch_idx):
            return total  # logging takes half a millisecond in Lightning
        size = batch_size(batch)
        if self.trainer.world_size > 1:
            figures = mean_over_processes(self.trainer.strategy, figures)
        self.latest_loss = loss = figures.pop("train/loss")
        rate = schedule_rate(self.trainer.optimizers[0].param_groups[0])
        self.log_dict({**figures, "train/lr": rate}, batch_size=size)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        return total

    def _mean_of_step(self, losses: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the means over the batches of an optimiser step so far, as its gradient is."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._losses_of_step = []
        self._losses_of_step.append(dict(losses))
        if len(self._losses_of_step) == 1:
            return losses
        return {
            name: torch.stack([part[name] for part in self._losses_of_step if name in part]).mean()
            for name in losses
        }

    def prepare_training(self, datamodule: Any) -> None:
        """Prepare a training before its first step; a no-op by default.

        Args:
            datamodule: Datamodule of the training, after ``setup``.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Change a training batch on its device, before the loss; unchanged by default."""
        return batch

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Refuse a batch of another form, such as the pairs of torchvision's data sets."""
        check_batch(batch, self.family)
        return batch

    def move_batch(self, batch: Batch) -> Batch:
        """Return a batch of a loader on this task's device, as a trainer gives it to a step."""
        batch = self.on_before_batch_transfer(batch, 0)
        batch = self.transfer_batch_to_device(batch, self.device, 0)
        return self.on_after_batch_transfer(batch, 0)

    @property
    def is_spare(self) -> bool:
        """Return True in a process beyond the number of examples; see ``batches.is_spare``."""
        return is_spare(self._trainer)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update metrics and loss with a batch; also those of the average if both are compared."""
        if self.is_spare:
            return
        self._evaluate(batch)
        if self._second_metrics is not None:
            assert self.ema is not None
            with self._second_metrics.swap_in(self), self.ema.applied_to(self.model):
                self._evaluate(batch)

    def _evaluate(self, batch: Batch) -> None:
        predictions = self.predict_for_metrics(batch)
        self.update_metrics(batch, predictions)
        if self.answers_metric and self._trainer is not None and self._trainer.testing:
            values = self.sample_values(batch, predictions)
            if values is not None:
                dtype = torch.float32 if values.ndim == 1 else torch.float64
                self._sample_values.append(values.detach().to(dtype))
        if not self.why_no_loss:
            loss, count = self.evaluation_loss(batch, predictions)
            self.loss_sum.update(loss)
            self.loss_count.update(count)

    def predict_for_metrics(self, batch: Batch) -> Any:
        """Return the predictions for the metrics."""
        return self.model.predict(batch)

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics; swap the average in, or set up the metrics of both."""
        self.reset_metrics()
        self.loss_sum.reset()
        self.loss_count.reset()
        self._second_metrics = None
        if self.ema is None:
            return
        is_training = self.trainer.state.fn == TrainerFn.FITTING
        if self.ema.report == "best" and self.ema.tensors and is_training:
            from tasks.engine.callbacks.ema_metrics import SecondMetrics

            stores = (*self.metric_stores, "loss_sum", "loss_count")
            self._second_metrics = SecondMetrics(self, stores)
        elif self.ema.is_reported:
            self.ema.swap_in(self.model)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over the whole set, equal on all processes; swap the average out."""
        if self._second_metrics is None:
            self._log_figures("val", self._figures())
        else:
            from tasks.engine.callbacks.ema_metrics import log_better

            log_better(self, self._second_metrics)
            self._second_metrics = None
        if self.ema is not None:
            self.ema.swap_out(self.model)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch as in validation."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        """Reset the metrics as in validation; the model keeps the average."""
        self.on_validation_epoch_start()
        self._sample_values = []

    def on_test_epoch_end(self) -> None:
        """Log the metrics under "test/", and keep the values of the samples."""
        self._log_figures("test", self._figures())
        trainer: Any = self.trainer
        dataset = getattr(trainer.test_dataloaders, "dataset", None)  # a user may pass several
        if self.answers_metric and isinstance(dataset, Sized):
            self.sample_answers = self.gather_answers(dataset)
            self._sample_values = []

    @property
    def answers_metric(self) -> str:
        """Return the name of the metric that ``sample_values`` returns; empty for none."""
        return self.family.answers

    def gather_answers(self, dataset: Sized) -> SampleAnswers:
        """Return the answers of a test of all processes, which call it together."""
        root = getattr(self.data, "root", None)
        return gather_answers(self.answers_metric, self._sample_values, dataset, root)

    def sample_values(self, batch: Batch, predictions: Any) -> Tensor | None:
        """Return the metric ``answers_metric`` of each sample (B,); 1 or 0 for right or wrong.

        A metric that is counted over the whole set has parts and wholes by class (B, 2, C). None
        leaves the samples to a ``gather_answers`` of the family's own.
        """
        raise NotImplementedError

    def update_metrics(self, batch: Batch, predictions: Any) -> None:
        """Update the metrics with one batch."""
        raise NotImplementedError

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the metrics since the last reset, over all processes."""
        raise NotImplementedError

    def evaluation_loss(self, batch: Batch, predictions: Any) -> Summed:
        """Return the summed loss of a batch's predictions and its count; see ``why_no_loss``."""
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

    def predict(
        self,
        images: Any,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        out: str | Path | None = None,
    ) -> Sequence[Row]:
        """Predict inputs, prepared as in evaluation, with a task from ``tasks.load``.

        Predictions are independent of the other inputs. Several threads may call at the same time.

        Args:
            images: Inputs of the family's data modules. Images: one or a list, as paths (a folder
                means all its images), PIL images, arrays (H, W, 3), tensors (3, H, W), grey ones
                (H, W), or batches of these; uint8, or floats from 0 to 1.
            batch_size: Inputs per batch; by default that of the run's evaluation.
            num_workers: Processes that read files.
            out: Folder. The predictions are written there as they come, as ``mode=predict`` writes
                them, so that any number of inputs fits in memory. Unreadable files are left out
                with a warning.

        Returns:
            A dict per input, as in predictions.json; see the tasks' ``describe``. With ``out`` a
            sequence that reads them from the file.

        Raises:
            ValueError: An input cannot be read, or with ``out`` none of them.
        """
        from tasks.engine import predicting

        data = predicting.serving(self, images, batch_size, num_workers)
        if out is not None:
            return predicting.predict_to(self, data, Path(out))
        return predicting.predict_all(self, data)

    def stream(
        self, images: Any, *, batch_size: int | None = None, num_workers: int = 0
    ) -> Iterator[Row]:
        """Yield what ``predict`` returns, holding one batch at a time.

        Unreadable files are left out with a warning; if all are, a ValueError names the first.
        """
        from tasks.engine import predicting

        return predicting.stream(self, predicting.serving(self, images, batch_size, num_workers))

    def export(self, to: str, **options: Any) -> list[Path]:
        """Export the network of a task from ``tasks.load``, as ``tools/export.py`` does.

        Args:
            to: Target, such as "onnx", "torch_export", "timm" or "mmdet".
            **options: Options of ``tools/export.py``: ``out``, ``overwrite``, ``image_size``, ...

        Returns:
            The written files.

        Raises:
            ValueError: The network cannot take this form, or the outputs of the export differ.
        """
        from tasks.engine.loading import export_task

        return export_task(self, to, options)

    def setup(self, stage: str) -> None:
        """Keep the trainer's datamodule, if it is one of ours, and copy its targets."""
        if self.family.exact_inputs:
            plugin: Any = self.trainer.precision_plugin
            plugin.convert_input = lambda batch: batch
        if self.trainer.precision == "64-true":
            self.double()  # Lightning does so after float32 has rounded a checkpoint's weights
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "with_predict_inputs"):
            self.data = data
            self.take_targets(data)

    def on_predict_start(self) -> None:
        """Name the files of the predictions after the datamodule's inputs."""
        trainer: Any = self.trainer
        # A user's loaders are unnamed.
        names = getattr(trainer.datamodule, "predict_names", list)
        from tasks.engine.run_folder.predictions import OutputFiles

        self._files = OutputFiles(Path(trainer.default_root_dir), names())

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Row]:
        """Predict a batch of the trainer's datamodule; write arrays to files of the run."""
        trainer: Any = self.trainer
        if self.is_spare:
            return []
        broken = batch.pop(UNREADABLE, ())
        rows = self.describe_to(batch, trainer.datamodule, self._files) if batch else []
        return rows + [{"input": sample.name, UNREADABLE: sample.reason} for sample in broken]

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return predictions as plain values, one dict per input with its name as ``input``."""
        raise NotImplementedError

    def describe_to(self, batch: Batch, datamodule: Any, files: OutputFiles) -> list[Row]:
        """Return rows of plain values; a task whose rows have arrays writes these to files."""
        return self.describe(batch, datamodule)

    def answer(self, row: Row) -> str:
        """Return a row of ``describe`` as a line for the terminal."""
        raise NotImplementedError

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions in other tools' formats; a no-op by default."""

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the predictions for a batch of the datamodule."""
        raise NotImplementedError

    def write_preview(self, folder: Path, batch: Batch, datamodule: Any) -> None:
        """Write files beside the pictures of ``preview``; a no-op by default."""

    def take_targets(self, datamodule: Any) -> None:
        """Copy targets from the datamodule; a no-op by default."""

    def target_arguments(self) -> dict[str, Any]:
        """Return the arguments of a datamodule's ``predict_only``; see ``targets_of``."""
        return {}

    def target_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that describe the targets."""
        return {}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return a checkpoint's arguments of ``predict_only``; None if the file lacks them."""
        return {}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of other targets; a no-op by default."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add targets, the network's options, and the average where loaders look first.

        Raises:
            ValueError: Weights of any process are not finite.
        """
        refuse_together(weights_problem(checkpoint.get("state_dict", {})))
        checkpoint |= network_entries(self) | self.target_state()
        if "optimizer_states" in checkpoint:
            checkpoint[STORED_RULES] = {name: tuple(rule) for name, rule in self._rules.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other targets; restore forms of mixers, average and groups."""
        from backbones.checkpoints.earlier_forms import take_recorded_forms

        opened = Checkpoint("the checkpoint", checkpoint)
        self.check_targets(opened)
        backbone: Any = getattr(self.model, "backbone", None)
        if isinstance(backbone, Backbone):
            before = backbone.record
            take_recorded_forms(backbone, opened.record)
            if backbone.record != before:
                vars(self).pop("fingerprint", None)
        trainer = self._trainer
        self.check_code(opened, resumes=bool(trainer and trainer.state.fn == TrainerFn.FITTING))
        load_average(self.ema, checkpoint, self.model)
        self.follow_rules(checkpoint)

    def follow_rules(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the rate and decay of each parameter from a checkpoint of a training."""
        if "optimizer_states" in checkpoint:
            self._rules = stored_rules(checkpoint, self.model, self.optimizer_options)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the backbone's code, as records keep it; see ``checkpoints.behaviour``."""
        return fingerprint_entry(getattr(self.model, "backbone", None))

    def check_code(self, checkpoint: Checkpoint, *, resumes: bool) -> None:
        """Warn of a checkpoint of the same network that was trained by other code.

        Raises:
            ValueError: ``resumes`` is true, so a training would go on by other code.
        """
        from backbones.checkpoints.behaviour import describe_answers, describe_change

        before, now = (record.get(FINGERPRINT) for record in (checkpoint.record, self.fingerprint))
        path = checkpoint.path
        if not before or not now or not describe_answers(path, before["answers"], now["answers"]):
            return
        # With the checkpoint's options and forms, which may be of an earlier version.
        change = describe_change(path, checkpoint.record, self.model.backbone.create)
        if change and resumes:
            raise ValueError(
                f"{change}; restore that code to resume, or start a new run from the weights by "
                f"backbone.pretrained={path}"
            )
        if change:
            warnings.warn(change, stacklevel=2)

    def config(self) -> dict[str, Any]:
        """Return the config that rebuilds this task; empty if a part is not of this project."""
        return built_config(self)

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load the model's weights from a checkpoint of this task.

        A classifier also accepts files of timm and of papers' authors.

        Args:
            checkpoint: A file, or its content.
            converted: Resize its tables to this network's sizes, to start a training from it.

        Raises:
            ValueError: The weights belong to another model or to other targets; the message lists
                the differences.
        """
        from backbones.checkpoints.adoption import adopt, convert

        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        self.check_targets(opened)
        adopt(self.model, convert(opened, self.model.backbone) if converted else opened)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **options: Any
    ) -> Self:
        """Build a task from a checkpoint of its class, for training or prediction.

        Args:
            checkpoint_path: The file, or a run folder.
            map_location: Device of the task.
            **options: Arguments of the class, such as ``model``, for a file that lacks the config
                of its task; and Lightning's own. Loading is always strict and executes no code
                from the file.

        Raises:
            ValueError: The file belongs to another task, or lacks the config of its task.
        """
        from tasks.engine.loading import task_from_file

        return task_from_file(cls, checkpoint_path, options).to(map_location)
