"""The base of all tasks: its parts put together, and what its checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.equations import RECORD
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import Remembering, check_arguments, plain_config
from tasks.engine.batches import Batch, Row, check_batch
from tasks.engine.classes import Orders, check_classes, warn_of_order
from tasks.engine.ema import WeightEMA
from tasks.engine.ema_metrics import SecondJudgement
from tasks.engine.evaluation import Evaluation
from tasks.engine.gather import refuse_together
from tasks.engine.optim import check_optimizer, learning_rate_factor, optimizer_rules
from tasks.engine.prediction import Prediction
from tasks.engine.training import Training

# Where a checkpoint keeps the average: if it is what a run reports, and if it is not.
EMA, UNREPORTED = "state_dict_ema", "state_dict_ema_not_reported"


BUILT = "config"  # the entry of a checkpoint that says how its task was built
OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3}
SCHEDULE: dict[str, Any] = {"name": "cosine"}


class BaseTask(Remembering, Training, Evaluation, Prediction):
    """Train a model on dict batches; ``tasks.engine.batches`` says what these hold.

    Args:
        model: An ``nn.Module`` with ``loss(batch)`` and ``predict(batch)``.
        class_names: Names of the classes, in label order.
        optimizer: ``name`` (see ``optimizer_names``), ``lr``, ``weight_decay``, what depends on
            the parameter (``parameter_rules``), and the optimiser's own options. What is left out
            is as in ``OPTIMIZER``.
        schedule: ``name`` and options of ``learning_rate_factor``; what is left out is as in
            ``SCHEDULE``.
        ema: Options of ``WeightEMA``, such as ``decay``, or None. With it the average is what
            validation and tests see and what loading a checkpoint gives, or with ``report="best"``
            whichever is better in a validation; training goes on from the weights themselves.

    Attributes:
        monitor: The metric, higher is better, that chooses the best checkpoint.
        category_ids: What the data's files call each label, if not by itself; kept in checkpoints.
        other_orders: The classes in each other order that their data can be read in.
        data: The datamodule that prepares images for ``predict``: by default that of the training.
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
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.class_names = tuple(class_names)
        self.category_ids: tuple[int, ...] = ()
        self.other_orders: Orders = {}
        self.data: Any = None
        self.optimizer_options = OPTIMIZER | dict(optimizer or {})
        self.schedule_options = SCHEDULE | dict(schedule or {})
        # Sums, since torchmetrics' mean drops its weights where it lets a NaN be seen; in double
        # precision, since pixels are many.
        self.loss_sum, self.loss_count = (
            SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2)
        )
        self._rules = optimizer_rules(model, self.optimizer_options)
        # Bad options are to be refused here, not when everything else is up and running.
        check_optimizer(self.optimizer_options)
        # Which rate is the top one is known with the batch that it is scaled to.
        scaled = self.optimizer_options.get("reference_batch")
        top = math.inf if scaled else self.optimizer_options["lr"]
        learning_rate_factor(1, 1, top, **self.schedule_options)
        check_arguments(WeightEMA, ema or {}, "task.ema")
        self.ema = None if ema is None else WeightEMA(**ema)
        self._beside: SecondJudgement | None = None
        self.latest_loss: Tensor | None = None
        self.class_figures: list[Row] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the classes, the network's options, and the average where loaders look first.

        Raises:
            ValueError: Weights that are not finite, of this process or another one.
        """
        refuse_together(_not_finite(checkpoint.get("state_dict", {})))
        checkpoint |= {BUILT: self.config()} if self.config() else {}
        checkpoint[RECORD] = dict(getattr(getattr(self.model, "backbone", None), "record", {}))
        checkpoint["class_names"] = list(self.class_names)
        checkpoint["category_ids"] = list(self.category_ids)
        if self.ema is not None and self.ema.tensors:
            state = self.ema.state_dict()
            tensors = {f"model.{key}": value for key, value in state["tensors"].items()}
            # Under the first name loaders of weights find it, whoever wrote them.
            place = EMA if self.ema.is_reported else UNREPORTED
            checkpoint |= {place: tensors, "ema_steps": state["steps"]}

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Refuse a batch of another form, such as the pairs that torchvision's data sets give."""
        check_batch(batch)
        return batch

    def config(self) -> dict[str, Any]:
        """Return what builds this task again, as a run's config has it; empty if nothing can.

        That is so of a model that is none of ``heads`` around a backbone of ``create_backbone``.
        """
        backbone: Any = getattr(self.model, "backbone", None)
        head, data = getattr(self.model, "made_by", None), getattr(self.data, "made_by", None)
        if backbone is None or not head or not getattr(backbone, "made_by", None):
            return {}
        groups = {"backbone": backbone.made_by, "head": head, "data": data, "task": self.made_by}
        groups |= {"optimizer": self.optimizer_options, "schedule": self.schedule_options}
        groups["task"] = {k: v for k, v in self.made_by.items() if k not in groups}
        try:
            return {name: plain_config(part) for name, part in groups.items()}
        except TypeError:
            return {}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **options: Any
    ) -> Self:
        """Build a task from a checkpoint of its kind, to train on or to predict with.

        Args:
            checkpoint_path: The file, or a run folder.
            map_location: Where to put the task.
            **options: Arguments of the class, such as ``model`` and ``class_names``, for a file
                that does not say how its task was built; and Lightning's own. Loading is always
                strict and executes nothing.

        Raises:
            ValueError: A file of another task, or one that does not say how it was built.
        """
        from tasks.engine.loading import open_task  # which knows how to build tasks

        if options.pop("strict", None) is False:
            raise ValueError("strict=False is refused: a checkpoint has all weights of its task")
        options = {k: v for k, v in options.items() if k not in ("weights_only", "hparams_file")}
        if "model" in options:
            opened = open_checkpoint(checkpoint_path)
            task = cls(**{"class_names": opened.class_names, **options})
            task.load_weights(opened)
        else:
            found = open_task(checkpoint_path)
            if options:
                raise ValueError(
                    f"{', '.join(options)} are those of {checkpoint_path}; pass model and "
                    "class_names as well for others"
                )
            if not isinstance(found, cls):
                raise ValueError(
                    f"{checkpoint_path} is of a {type(found).__name__}, not of a {cls.__name__}"
                )
            task = found
        return task.to(map_location)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse one of other classes, and take over the average."""
        check_classes(checkpoint, self.class_names, "the checkpoint", self.other_orders)
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
        check_classes(opened.values, self.class_names, opened.path, self.other_orders)
        adopt(self.model, opened)
        if opened.class_names is None:
            warn_of_order(opened.path, self.class_names, self.other_orders)


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong with weights or statistics; the latter may be each process's own."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            return f"{name} holds NaN or Inf; the checkpoint before is kept"
    return None
