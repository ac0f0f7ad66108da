"""Classification of images with any number of labels each."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MultilabelAveragePrecision,
    MultilabelExactMatch,
    MultilabelF1Score,
    MultilabelStatScores,
)

from heads.label_losses import MultiLabelLoss
from tasks.classification.contact_sheet import Tile, contact_sheet, to_image
from tasks.classification.task import ClassificationTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.multi_label.family import FAMILY

NONE = "-"  # shown for an image without labels


class MultiLabelTask(ClassificationTask):
    """Classification with any number of labels per image; average precision and F1 in percent.

    The mean average precision averages over the classes that occur; ``F1`` is their mean, and
    ``F1_micro`` counts all labels together. The validation loss is the binary cross entropy without
    smoothing, averaged over the classes, so that runs with different training losses compare.

    Args:
        model: Maps ``{"image": (B, 3, H, W), "label": (B, K)}`` to losses and logits (B, K).
        class_names: Names of the K classes, in label order.
        optimizer: See ``BaseTask``.
        schedule: See ``BaseTask``.
        loss: Options of ``MultiLabelLoss``; by default the binary cross entropy.
        mixup: Options of ``timm.data.Mixup``, or None. The labels of two images are mixed in the
            same proportion; smoothing draws them towards 1/2.
        random_erasing: See ``ClassificationTask``.
        ema: See ``BaseTask``.
        check_patches: See ``ClassificationTask``.
        threshold: Probability from which a label is predicted.

    Raises:
        ValueError: An option is out of range.
    """

    family = FAMILY
    headline = ("mAP", "F1")
    metric_stores = ("accuracy",)
    loss_class = MultiLabelLoss

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        loss: Mapping[str, Any] | None = None,
        mixup: Mapping[str, Any] | None = None,
        random_erasing: float = 0.0,
        ema: Mapping[str, Any] | None = None,
        check_patches: bool = True,
        threshold: float = 0.5,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"task.threshold must be between 0 and 1, got {threshold}")
        self.threshold = threshold
        super().__init__(
            model,
            class_names,
            optimizer=optimizer,
            schedule=schedule,
            loss=loss,
            mixup=mixup,
            random_erasing=random_erasing,
            ema=ema,
            check_patches=check_patches,
        )

    def make_metrics(self, classes: int) -> MetricCollection:
        """Return the metrics of probabilities for a number of classes."""
        # torchmetrics validates that there are two labels or more, but computes one as well.
        options: dict[str, Any] = {
            "num_labels": classes, "threshold": self.threshold, "validate_args": classes > 1
        }  # fmt: skip
        metrics: dict[str, Metric | MetricCollection] = {
            "mAP": MultilabelAveragePrecision(classes, average="none", validate_args=classes > 1),
            "F1": MultilabelF1Score(**options, average="none"),
            "F1_micro": MultilabelF1Score(**options, average="micro"),
            "exact": MultilabelExactMatch(**options),
            "counts": MultilabelStatScores(**options, average="none"),
        }
        return MetricCollection(metrics, compute_groups=False)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of mean average precision, the two F1 and exact matches."""
        return tuple(str(name) for name in self.accuracy if name != "counts")

    def check_labels(self, table: Any) -> None:
        """Refuse data with one label per image.

        Args:
            table: The option ``data.labels``.
        """
        if table is None:
            raise ValueError(
                "task=multi_label needs the labels of each image: pass data.labels=<csv file>, "
                "relative to data.root, or task=classification for class folders"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """Apply mixup and random erasing to a training batch.

        Raises:
            ValueError: The labels have another form.
        """
        self._check_batch(batch)
        return super().prepare_batch(batch)

    def _check_batch(self, batch: Batch) -> None:
        label = batch["label"]
        shape = (len(batch["image"]), len(self.class_names))
        if tuple(label.shape) != shape or not ((label == 0) | (label == 1)).all():
            raise ValueError(
                f"the labels of this batch have the shape {tuple(label.shape)}; expected {shape} "
                "with 1 for each label of an image, else 0"
            )

    def on_test_epoch_start(self) -> None:
        """Reset the metrics, without the calibration of one label per image."""
        super(ClassificationTask, self).on_test_epoch_start()

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Update the metrics with the probabilities of a batch."""
        self._check_batch(batch)
        # The labels are kept: a copy, as each tensor of a worker keeps a file open.
        labels = batch["label"].to(torch.int32, copy=True)
        self.accuracy.update(predictions.float().sigmoid(), labels)

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return 1 for each image with all labels right, else 0 (B,)."""
        return ((predictions.float().sigmoid() > self.threshold) == batch["label"].bool()).all(1)

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the metrics in percent, and those of each class as ``class_figures``."""
        with warnings.catch_warnings():  # classes that do not occur are left out below
            warnings.filterwarnings("ignore", message="No positive samples found in target")
            figures = self.accuracy.compute()
        # torchmetrics drops the axis of a single class.
        precisions, scores = figures["mAP"].reshape(-1), figures["F1"].reshape(-1)
        occurs = figures.pop("counts").reshape(len(scores), -1)[:, -1] > 0
        self.class_figures = [
            {
                "class": name,
                "AP": 100 * float(precision) if has_positives else None,
                "F1": 100 * float(score) if has_positives else None,
            }
            for name, precision, score, has_positives in zip(
                self.class_names, precisions, scores, occurs.tolist(), strict=True
            )
        ]
        means = {"mAP": precisions[occurs].mean(), "F1": scores[occurs].mean()}
        return {name: 100 * value for name, value in (figures | means).items()}

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the binary cross entropy, summed over images, and their number."""
        labels = batch["label"].float()
        losses = F.binary_cross_entropy_with_logits(predictions.float(), labels, reduction="none")
        return losses.mean(1).sum(), torch.tensor(len(labels), device=losses.device)

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per image ``input``, its name, the predicted ``classes`` and all ``scores``.

        The classes are those from the threshold on, the surest first; ``probabilities`` are theirs.
        """
        probabilities = self.model.predict(batch).float().sigmoid().cpu()
        names = input_names(batch, datamodule, self.family.modality)
        rows = []
        for name, row in zip(names, probabilities, strict=True):
            order = [i for i in row.argsort(descending=True).tolist() if row[i] >= self.threshold]
            rows.append(
                {
                    "input": name,
                    "classes": [self.class_names[i] for i in order],
                    "probabilities": [round(float(row[i]), 6) for i in order],
                    "scores": {
                        class_name: round(share, 6)
                        for class_name, share in zip(self.class_names, row.tolist(), strict=True)
                    },
                }
            )
        return rows

    def answer(self, row: Row) -> str:
        """Return the predicted classes with their probabilities."""
        best = zip(row["classes"], row["probabilities"], strict=True)
        return ", ".join(f"{name} ({share:.3f})" for name, share in best) or "no label"

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions.csv: the image, its labels separated by ";", and all probabilities."""
        with whole_file(folder / "predictions.csv") as file:
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            writer = csv.writer(text)
            writer.writerow(["input", "labels", *self.class_names])
            for row in rows:
                scores = (row["scores"][name] for name in self.class_names)
                writer.writerow([row["input"], ";".join(row["classes"]), *scores])
            text.flush()
            text.detach()

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw one sheet of images with their labels and the probability of the least sure answer.

        Captions are green if all labels are right, otherwise red with the right ones below, and
        grey for images without known labels.
        """
        weights = next(self.model.parameters())
        shares = self.model.predict({"image": batch["image"].to(weights)}).float().sigmoid()
        guesses = shares >= self.threshold
        certainties = torch.where(guesses, shares, 1 - shares).amin(1)
        labels = batch["label"] if batch["label"].ndim == 2 else [None] * len(shares)
        tiles = []
        for image, label, guess, share in zip(
            batch["image"], labels, guesses, certainties.tolist(), strict=True
        ):
            right = None if label is None else bool((label.to(guess.device).bool() == guess).all())
            truth = self._names(label.bool()) if label is not None and not right else None
            picture = to_image(image, *datamodule.normalisation)
            tiles.append(Tile(picture, self._names(guess), share, right, truth))
        return [contact_sheet(tiles)]

    def _names(self, flags: Tensor) -> str:
        names = [name for name, flag in zip(self.class_names, flags.tolist(), strict=True) if flag]
        return ", ".join(names) or NONE
