"""Image classification, on ImageNet or by transfer to sets such as CIFAR-100."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from PIL import Image
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

from backbones import Backbone
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.hosts.lvt.token_classifier import TokenClassifier
from backbones.options import check_arguments, check_value
from heads.label_losses import LabelLoss
from heads.linear import LinearClassifier
from heads.losses import NO_TOKENS
from heads.token_label_maps import token_labels
from tasks.classification.calibration import Calibration, TemperatureFit
from tasks.classification.contact_sheet import Tile, contact_sheet, to_image
from tasks.classification.family import FAMILY
from tasks.classification.patch_check import unseen_patches
from tasks.classification.teacher import (
    OPTION,
    Normalisation,
    Teacher,
    TeacherOptions,
    load_teacher,
)
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.classes import ClassesTask, check_several, readable
from tasks.engine.drawing import draw_bands
from tasks.engine.loops.process_exchange import refuse_together
from tasks.engine.run_folder.atomic_writes import whole_file

LISTED = 50  # classes that a test prints; classes.csv has all
make_mixup: Any = Mixup  # timm's classes are untyped
make_erasing: Any = RandomErasing


class ClassificationTask(ClassesTask):
    """Classification with hard or mixed labels; top-1 and top-5 accuracy in percent.

    The validation loss is the cross entropy without smoothing, so that runs with different
    training losses compare.

    Args:
        model: Maps ``{"image": (B, 3, H, W), "label": (B,)}`` to losses and logits (B, K).
        class_names: Names of the K classes, in label order.
        optimizer: See ``BaseTask``.
        schedule: See ``BaseTask``.
        mixup: Options of ``timm.data.Mixup``, such as ``mixup_alpha``, ``cutmix_alpha`` and
            ``label_smoothing``, or None. With Mixup its label smoothing applies.
        random_erasing: Probability of filling a rectangle of an image with noise after mixing, as
            timm's training script does. An augmentation's ``random_erasing`` does it before.
        loss: Options of ``LabelLoss``, such as ``name`` and ``class_weights``; by default cross
            entropy.
        distillation: Options of ``TeacherOptions``; without a ``type`` the teacher is left out.
        ema: See ``BaseTask``.
        check_patches: Stop before the first step if the embedding ignores a patch of the image, see
            ``patch_check``.
        calibrate: Fit a temperature on the validation images after each validation; checkpoints
            keep it, and predicted probabilities use it.

    Attributes:
        temperature: Divisor of the logits in ``describe``; 1 if none was fitted.

    Raises:
        ValueError: Mixup lacks an option, or labels would be smoothed twice.
    """

    family = FAMILY
    preview_images = 36
    headline = ("top1", "top5")
    metric_stores: tuple[str, ...] = ("accuracy", "temperature_fit")
    loss_class: ClassVar[type[LabelLoss]] = LabelLoss

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        mixup: Mapping[str, Any] | None = None,
        random_erasing: float = 0.0,
        loss: Mapping[str, Any] | None = None,
        distillation: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
        check_patches: bool = True,
        calibrate: bool = False,
    ) -> None:
        super().__init__(model, class_names, optimizer=optimizer, schedule=schedule, ema=ema)
        several = self.loss_class.multi_label
        if not several:
            check_several(self.class_names, "a class folder or label of the other images")
        classes = len(self.class_names)
        self.shown_names = tuple(readable(name) for name in self.class_names)
        self._has_other_names = self.shown_names != self.class_names
        check_arguments(Mixup, mixup or {}, "task.mixup")
        check_mixup(mixup or {})
        self.mixup = (
            make_mixup(num_classes=classes, multi_label=several, **mixup or {}) if mixup else None
        )
        if not 0 <= random_erasing <= 1:
            raise ValueError(f"task.random_erasing must be from 0 to 1, got {random_erasing}")
        self.erasing = make_erasing(random_erasing, mode="pixel") if random_erasing else None
        if self.mixup and self.mixup.label_smoothing and getattr(model, "label_smoothing", 0):
            raise ValueError(
                f"task.mixup.label_smoothing={self.mixup.label_smoothing} and "
                f"head.label_smoothing={model.label_smoothing} would both smooth the labels; "
                "set one of them to 0"
            )
        check_arguments(self.loss_class, loss or {}, "task.loss")
        self.label_loss = self.loss_class(**loss or {})
        self._check_loss(bool(mixup))
        check_arguments(TeacherOptions, distillation or {}, OPTION)
        self.distillation = TeacherOptions(**distillation or {})
        self._teacher: tuple[Teacher, Normalisation] | None = None
        self._others: Tensor | None = None
        self.check_patches = check_patches
        self.calibrate, self.temperature = calibrate, 1.0
        self.temperature_fit = TemperatureFit()
        self.calibration: dict[str, Calibration] = {}
        self.accuracy = self.make_metrics(classes)

    def make_metrics(self, classes: int) -> MetricCollection:
        """Return the metrics of predictions for a number of classes."""
        accuracies: dict[str, Metric | MetricCollection] = {
            f"top{k}": MulticlassAccuracy(classes, top_k=k, average="micro")
            for k in (1, 5)
            if k < classes
        }
        counts = MulticlassStatScores(classes, average="none")
        # Groups would join top1 and top5 for good where both agree on the first batch.
        return MetricCollection(accuracies | {"counts": counts}, compute_groups=False)

    def _check_loss(self, is_mixed: bool) -> None:
        """Refuse a loss that the model or mixup cannot use."""
        self.label_loss.check_classes(len(self.class_names))
        if self.label_loss.is_usual:
            return
        if not isinstance(self.model, LinearClassifier):
            raise ValueError(
                "task.loss needs a classifier that is trained by it: pass head=linear or "
                "head=linear_probe, or leave task.loss out"
            )
        if is_mixed and self.label_loss.name == "asymmetric":
            raise ValueError(
                "task.loss.name=asymmetric takes whole labels, which mixup mixes: pass "
                "task.mixup=null"
            )

    def take_targets(self, datamodule: Any) -> None:
        """Copy the targets of the data.

        Raises:
            ValueError: The data have another number of labels per image.
        """
        super().take_targets(datamodule)
        self.check_labels(getattr(datamodule, "labels", None))

    def check_labels(self, table: Any) -> None:
        """Refuse data with several labels per image.

        Args:
            table: The option ``data.labels``.
        """
        if table is not None:
            raise ValueError(
                f"data.labels={table} gives images any number of labels; pass task=multi_label, or "
                "leave it out to read class folders"
            )

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return top1, top5 for more than five classes, balanced accuracy and macro F1."""
        accuracies = (str(name) for name in self.accuracy if name != "counts")
        return (*accuracies, "balanced_accuracy", "F1")

    def prepare_training(self, datamodule: Any) -> None:
        """Load the teacher, if any, and check that the model can use token labels.

        Raises:
            ValueError: The teacher cannot be loaded or has other classes, or token labels meet
                mixup or a network without a token classifier.
        """
        if getattr(datamodule, "token_labels", None) is not None:
            check_token_labels(self.model, self.mixup)
        if self.label_loss.needs_counts:
            if not hasattr(datamodule, "class_counts"):
                raise ValueError(
                    "task.loss.class_weights=balanced needs a datamodule, which counts the images "
                    "per class: call trainer.fit(task, datamodule=...), or pass a list of weights"
                )
            self.label_loss.prepare(datamodule.class_counts())
        if self.distillation.how is not None and self._teacher is None:
            if not hasattr(datamodule, "normalisation"):
                raise ValueError(
                    "task.distillation needs a datamodule, which defines how to normalise images: "
                    "call trainer.fit(task, datamodule=...)"
                )
            images = datamodule.normalisation
            orders = getattr(datamodule, "other_orders", {})
            teacher = load_teacher(self.distillation, self.class_names, images, orders)
            self._teacher = teacher, images

    def setup(self, stage: str) -> None:
        """Prepare a training that a trainer starts without ``tools/run.py``."""
        super().setup(stage)
        if stage == "fit":
            self.prepare_training(self.trainer.datamodule)  # type: ignore[attr-defined]
            if self._shards_weights():  # weights are whole until the strategy shards them
                self._check_patches(torch.empty(0), contextlib.nullcontext())

    def on_fit_start(self) -> None:
        """Stop if the embedding ignores a patch, on the training's device and in its precision."""
        if not self._shards_weights():
            precision = self.trainer.precision_plugin
            like = precision.convert_input(torch.empty(0, device=self.device))
            self._check_patches(like, precision.forward_context())

    def _shards_weights(self) -> bool:
        return isinstance(getattr(self.trainer, "strategy", None), FSDPStrategy)

    def _check_patches(self, like: Tensor, autocast: AbstractContextManager[Any]) -> None:
        backbone = getattr(self.model, "backbone", None)
        if not self.check_patches or not isinstance(backbone, Backbone):
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        side = getattr(data, "image_size", None)
        size = backbone.img_size if side is None else (side, side)
        with autocast:
            problem = unseen_patches(backbone, size, like)
        refuse_together(problem)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Refuse bytes that no datamodule normalises."""
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        images = batch.get("image")
        trainer: Any = self._trainer
        running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        without = running and getattr(trainer, "datamodule", None) is None
        if without and isinstance(images, Tensor) and images.dtype == torch.uint8:
            raise ValueError(
                "this loader gives images as bytes, which a datamodule normalises: call "
                "trainer.fit(task, datamodule=...), or let the loader give normalised floats"
            )
        return batch

    def prepare_batch(self, batch: Batch) -> Batch:
        """Apply mixup and random erasing to a training batch, and add the teacher's logits.

        Random numbers come from the global generators, which checkpoints save. The teacher sees the
        same images as the student.
        """
        batch = self._with_token_labels(self._mixed(batch))
        if not self.label_loss.is_cross_entropy:
            batch = batch | {"label_loss": self.label_loss}
        if self._teacher is None:
            return batch
        teacher, normalisation = self._teacher
        return batch | {"taught": teacher.teacher_logits(batch["image"], normalisation)}

    def _with_token_labels(self, batch: Batch) -> Batch:
        if "token_scores" not in batch:
            return batch
        images, stride = batch["image"], self.model.backbone.feature_info[-1].stride
        size = -(-images.shape[2] // stride), -(-images.shape[3] // stride)
        scores, classes, boxes = (batch[f"token_{part}"] for part in ("scores", "classes", "box"))
        labels = token_labels(scores, classes, boxes, len(self.class_names), size)
        return batch | {"token_labels": labels.to(images.dtype)}

    def _mixed(self, batch: Batch) -> Batch:
        if self.mixup is None and self.erasing is None:
            return batch
        image, label = batch["image"], batch["label"]
        if self.mixup is not None:
            if len(image) % 2:
                raise ValueError(
                    f"task.mixup pairs the images of a batch, but this one has {len(image)}; pass "
                    "an even data.batch_size that the training set fills, or task.mixup=null"
                )
            image, label = self.mixup(image, label)
        if self.erasing is not None:
            self.erasing.device = image.device
            image = self.erasing(image)
        return batch | {"image": image, "label": label}

    def only_classes(self, labels: Sequence[int] = ()) -> None:
        """Restrict evaluation to these classes; without labels, reset it to all.

        Source: as the authors of ImageNet-A and ImageNet-R evaluate networks of 1000 classes.
        """
        excluded_labels = sorted(set(range(len(self.class_names))) - set(labels)) if labels else []
        self._others = torch.tensor(excluded_labels, dtype=torch.int64) if excluded_labels else None

    def predict_for_metrics(self, batch: Batch) -> Tensor:
        """Return logits (B, K), minus infinity for classes that ``only_classes`` excludes."""
        logits: Tensor = self.model.predict(batch)
        if self._others is None:
            return logits
        return logits.index_fill(1, self._others.to(logits.device), -math.inf)

    def on_test_epoch_start(self) -> None:
        """Begin to measure the calibration, with the fitted temperature as well, if any."""
        super().on_test_epoch_start()
        classes = len(self.class_names)
        fits = {"": 1.0} | ({"scaled_": self.temperature} if self.temperature != 1 else {})
        self.calibration = {
            prefix: Calibration(classes, value).to(self.device) for prefix, value in fits.items()
        }

    def on_test_epoch_end(self) -> None:
        """Log the metrics under "test/", those of the calibration among them."""
        super().on_test_epoch_end()
        self.calibration = {}

    def on_validation_epoch_end(self) -> None:
        """Log the metrics; keep the temperature of the weights that they belong to."""
        super().on_validation_epoch_end()
        if self.calibrate and self.trainer.state.fn == TrainerFn.FITTING:
            self.temperature = float(self.trainer.callback_metrics["val/temperature"])

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Update the accuracies, and what measures and fits probabilities."""
        self.accuracy.update(predictions, batch["label"])
        for calibration in self.calibration.values():
            calibration.update(predictions, batch["label"])
        if self.calibrate and not self.calibration:
            self.temperature_fit.update(predictions, batch["label"])

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return 1 for each image whose likeliest class is right, else 0 (B,)."""
        return predictions.argmax(1) == batch["label"]

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the accuracies in percent, and in a test the calibration.

        Those of each class become ``class_figures``. Balanced accuracy, the mean recall, and F1 are
        means over the classes that occur.
        """
        metrics = self.accuracy.compute()
        hits, false_alarms, _, misses, support = metrics.pop("counts").cpu().double().unbind(-1)
        recalls, scores = hits / support, 2 * hits / (2 * hits + false_alarms + misses)
        shares = 100 * torch.stack([hits / (hits + false_alarms), recalls, scores], dim=-1)
        self.class_figures = [
            {
                "class": name,
                "precision": _finite(precision), "recall": _finite(recall), "F1": _finite(score),
                "images": int(count),
            }
            for name, (precision, recall, score), count in zip(
                self.class_names, shares.tolist(), support.tolist(), strict=True
            )
        ]  # fmt: skip
        means = {"balanced_accuracy": recalls.nanmean(), "F1": scores[support > 0].mean()}
        metrics |= {name: mean.float().to(self.device) for name, mean in means.items()}
        figures = {name: 100 * value for name, value in metrics.items()}
        for prefix, calibration in self.calibration.items():
            figures |= {f"{prefix}{name}": value for name, value in calibration.compute().items()}
        if self.calibrate and not self.calibration:
            figures["temperature"] = self.temperature_fit.compute()
        return figures

    def shown_figures(self, mode: str) -> list[Row]:
        """Return the figures of a few classes, which a test prints; classes.csv has all."""
        rows = super().shown_figures(mode)
        return rows if len(rows) <= LISTED else []

    def target_state(self) -> dict[str, Any]:
        """Return the classes, and the temperature if one was fitted."""
        fitted = {} if self.temperature == 1 else {"temperature": self.temperature}
        return super().target_state() | fitted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the temperature as well."""
        super().on_load_checkpoint(checkpoint)
        self.temperature = checkpoint.get("temperature", 1.0)

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load the weights, and the temperature that was fitted with them."""
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        super().load_weights(opened, converted=converted)
        self.temperature = opened.values.get("temperature", 1.0)

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the summed cross entropy and the number of images with a label."""
        labels = batch["label"]
        mask = labels >= 0
        loss = F.cross_entropy(predictions[mask].float(), labels[mask], reduction="sum")
        return loss, mask.sum()

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        self.accuracy.reset()
        self.temperature_fit.reset()

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per image ``input``, its name, the five best ``classes`` and ``probabilities``.

        For ImageNet's synsets ``names`` has the everyday names.
        """
        probabilities = (self.model.predict(batch).float() / self.temperature).softmax(-1)
        best = probabilities.topk(min(5, len(self.class_names)))
        names = input_names(batch, datamodule, self.family.modality)
        indices, values = best.indices.tolist(), best.values.tolist()
        return [
            {
                "input": name,
                "classes": [self.class_names[i] for i in labels],
                **(
                    {"names": [self.shown_names[i] for i in labels]}
                    if self._has_other_names
                    else {}
                ),
                "probabilities": [round(share, 6) for share in shares],
            }
            for name, labels, shares in zip(names, indices, values, strict=True)
        ]

    def answer(self, row: Row) -> str:
        """Return the best classes with their probabilities."""
        best = zip(row["names" if "names" in row else "classes"], row["probabilities"], strict=True)
        return ", ".join(f"{name} ({share:.3f})" for name, share in best)

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions.csv: the image, then class and probability of each prediction.

        The everyday name, if ``describe`` has one, stands between the two.
        """
        kinds = ["class", "probability"]
        keys = ["classes", "probabilities"]
        if self._has_other_names:
            kinds.insert(1, "name")
            keys.insert(1, "names")
        places = range(1, 1 + min(5, len(self.class_names)))
        # File names need not be UTF-8; they are written unchanged.
        with whole_file(folder / "predictions.csv") as file:
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            writer = csv.writer(text)
            writer.writerow(["input", *(f"{kind}_{i}" for i in places for kind in kinds)])
            for row in rows:
                groups = zip(*(row[key] for key in keys), strict=True)
                writer.writerow([row["input"], *(value for group in groups for value in group)])
            text.flush()
            text.detach()

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw one sheet of images with the predicted class and its probability.

        Correct captions are green, wrong ones red with the right class below, and those of images
        without a label (negative) grey.
        """
        # Outside the trainer the images still need the precision of the weights.
        weights = next(self.model.parameters())
        images = {"image": batch["image"].to(weights)}
        best = self.model.predict(images).float().softmax(-1).max(-1)
        tiles = []
        for image, label, guess, share in zip(
            batch["image"], batch["label"].tolist(), best.indices.tolist(), best.values.tolist(),
            strict=True,
        ):  # fmt: skip
            right = None if label < 0 else label == guess
            truth = self.shown_names[label] if right is False else None
            if getattr(datamodule, "bands", None) is None:
                picture = to_image(image, *datamodule.normalisation)
            else:
                picture = draw_bands(image.float().permute(1, 2, 0).cpu().numpy())
            tiles.append(Tile(picture, self.shown_names[guess], share, right, truth))
        return [contact_sheet(tiles)]


def _finite(figure: float) -> float | None:
    """Return a figure; None for NaN, of a class that does not occur or is not predicted."""
    return None if math.isnan(figure) else figure


def check_token_labels(model: Any, mixup: Any) -> None:
    """Refuse token labels that the model or mixup cannot use.

    Raises:
        ValueError: States what to pass.
    """
    if not isinstance(getattr(model, "classifier", None), TokenClassifier):
        raise ValueError(NO_TOKENS)
    if mixup is not None:
        raise ValueError(
            "token labels are those of unmixed images, which MixToken mixes within the network: "
            "pass task.mixup=null"
        )


def check_mixup(options: Mapping[str, Any]) -> None:
    """Refuse invalid values that timm's Mixup accepts silently.

    Raises:
        ValueError: Names the option and its valid values.
    """
    for name, value in options.items():
        option = f"task.mixup.{name}"
        if name == "mode":
            check_value(option, value, Literal["batch", "pair", "elem"])
        elif name == "correct_lam":
            check_value(option, value, bool)
        elif name in ("num_classes", "multi_label"):
            raise ValueError(f"{option} follows from the task and its data; leave it out")
        elif name == "cutmix_minmax":
            check_value(option, value, Sequence[float] | None)
            if value is not None and not (len(value) == 2 and 0 <= value[0] <= value[1] <= 1):
                raise ValueError(
                    f"{option}={value} must be two increasing shares, such as [0.2,0.8]"
                )
        else:
            check_value(option, value, float)
            most = math.inf if name.endswith("_alpha") else 1
            if not 0 <= value <= most:
                limits = "at least 0" if most > 1 else "from 0 to 1"
                raise ValueError(f"{option} must be {limits}, got {value}")
    if options and not any(options.get(name) for name in ("cutmix_alpha", "cutmix_minmax")):
        if not options.get("mixup_alpha", 1.0):
            raise ValueError(
                "task.mixup needs an alpha above 0; to disable it pass task.mixup=null"
            )
