"""Semantic segmentation of point clouds, by mean IoU over all points."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from heads.point_segmentation import IGNORED
from tasks.engine.answers import overlaps
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.classes import ClassesTask, check_several
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.engine.run_folder.predictions import OutputFiles
from tasks.point_segmentation.family import FAMILY
from tasks.point_segmentation.pictures import UNKNOWN, draw_cloud, palette
from tasks.point_segmentation.ply import write_ply
from tasks.point_segmentation.scores import Absent, scores

log_info = rank_zero_only(logging.getLogger(__name__).info)

CLOUDS = "clouds"  # folder of labelled clouds
MOST = 8  # classes of a cloud listed in a line


class PointSegmentationTask(ClassesTask):
    """Classes of points; mean IoU, mean class accuracy and accuracy of points in percent.

    Counts are summed over all points of the set before dividing.

    Args:
        model: See ``BaseTask``.
        class_names: Names of the classes, in label order.
        mix: Share of training batches whose clouds are merged in pairs.
        absent: The means skip classes that neither occur nor are predicted ("skip"), or count them
            as 0 ("zero"), as Pointcept and the papers that use it.
        **options: Options of ``BaseTask``.

    Source of ``mix``: Nekrasov et al., "Mix3D", 3DV 2021, https://arxiv.org/abs/2110.02210.
    """

    family = FAMILY
    headline = ("mIoU", "allAcc")
    metric_stores = ("confusion",)
    preview_images = 3

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        mix: float = 0.0,
        absent: Absent = "skip",
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, class_names, optimizer=optimizer, schedule=schedule, ema=ema)
        check_several(self.class_names, "a class of the other points")
        if not 0 <= mix <= 1:
            raise ValueError(f"task.mix must be from 0 to 1, got {mix}")
        if absent not in get_args(Absent):
            raise ValueError(f"task.absent must be {' or '.join(get_args(Absent))}, got {absent!r}")
        self.mix, self.absent = mix, absent
        self.counts: dict[str, list[int]] = {}
        self.confusion = MulticlassConfusionMatrix(len(self.class_names), ignore_index=IGNORED)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of mean IoU, mean class accuracy and accuracy of points."""
        return ("mIoU", "mAcc", "allAcc")

    def prepare_batch(self, batch: Batch) -> Batch:
        """Merge the clouds of a training batch in pairs, in a share of the batches."""
        if not self.mix or len(batch["points"]) < 2 or torch.rand(()) >= self.mix:
            return batch
        return {**batch, "points": paired(batch["points"], float("nan")),
                "labels": paired(batch["labels"], IGNORED)}  # fmt: skip

    def predict_for_metrics(self, batch: Batch) -> Tensor:
        """Return the predictions; validation during training takes one view, as the authors'."""
        return self.model.predict(batch, one_view=self._fits())

    def _fits(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Count points by label (rows) and prediction (columns)."""
        self.confusion.update(predictions.argmax(-1).flatten(), batch["labels"].flatten())

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return the points of each cloud in intersection and union by class (B, 2, C)."""
        classes = len(self.class_names)
        return torch.stack(
            [
                overlaps(predicted, labels, classes, IGNORED)
                for predicted, labels in zip(predictions.argmax(-1), batch["labels"], strict=True)
            ]
        )

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return mIoU, mAcc and allAcc in percent."""
        counts = self.confusion.compute()
        hits, truth, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        union = truth + predicted - hits
        self.counts = {
            "intersection": hits.tolist(), "union": union.tolist(), "target": truth.tolist(),
        }  # fmt: skip
        self.class_figures = [
            {"class": name, "IoU": _share(hit, joint), "Acc": _share(hit, size), "points": size}
            for name, hit, joint, size in zip(self.class_names, *self.counts.values(), strict=True)
        ]
        figures = scores(self.counts, self.absent)
        if not self._fits():
            self._name_absent(figures)
        return {name: torch.tensor(value, device=counts.device) for name, value in figures.items()}

    def _name_absent(self, figures: Mapping[str, float]) -> None:
        """Log what the other rule gives, if a class is absent."""
        absent = [row["class"] for row in self.class_figures if row["IoU"] is None]
        if absent:
            skipped, zero = (scores(self.counts, rule)["mIoU"] for rule in get_args(Absent))
            log_info(
                f"{len(absent)} of {len(self.class_names)} classes neither occur nor are predicted "
                f"({', '.join(absent[:MOST])}{', ...' * (len(absent) > MOST)}). mIoU is "
                f"{figures['mIoU']:.2f} by task.absent={self.absent}: {zero:.2f} counts them as 0, "
                f"as Pointcept and the papers do; {skipped:.2f} skips them"
            )

    def summary_facts(self) -> dict[str, Any]:
        """Return the points per class: predicted right, labelled or predicted, and labelled."""
        return {"counts": self.counts} if self.counts else {}

    def reset_metrics(self) -> None:
        """Reset the counts."""
        self.confusion.reset()

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the summed cross entropy and the number of labelled points."""
        counted = batch["labels"] != IGNORED
        losses = F.nll_loss(predictions[counted], batch["labels"][counted], reduction="sum")
        return losses.double(), counted.sum()

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per cloud ``input``, its name, ``shares`` of points by class, ``labels`` (N,)."""
        rows = []
        predicted = self.model.predict(batch).argmax(-1).cpu()
        names = input_names(batch, datamodule, "cloud")
        for index, (name, labels) in enumerate(zip(names, predicted, strict=True)):
            point_labels = labels[~batch["points"][index, :, 0].isnan().cpu()]
            classes, counts = point_labels.unique(return_counts=True)
            shares = (counts / counts.sum()).tolist()
            class_shares = {
                self.class_names[label]: round(share, 6)
                for label, share in zip(classes.tolist(), shares, strict=True)
            }
            rows.append({"input": name, "shares": class_shares, "labels": point_labels.numpy()})
        return rows

    def describe_to(self, batch: Batch, datamodule: Any, files: OutputFiles) -> list[Row]:
        """Return rows with a ply file in the place of labels: clouds/<name>.ply."""
        rows = []
        answers = self.describe(batch, datamodule)
        for row, number in zip(answers, batch["sample_id"].tolist(), strict=True):
            target = files.path(CLOUDS, row["input"], ".ply")
            self._write_cloud(target, datamodule.predicted_cloud(number), row["labels"])
            rows.append(row | {"labels": files.relative(target)})
        return rows

    @torch.no_grad()
    def write_preview(self, folder: Path, batch: Batch, datamodule: Any) -> None:
        """Write the clouds of the pictures with predicted labels: 00.ply, 01.ply, ..."""
        answers = self.describe(batch, datamodule)
        for index, (row, number) in enumerate(
            zip(answers, batch["sample_id"].tolist(), strict=True)
        ):
            cloud = datamodule.predicted_cloud(number)
            self._write_cloud(folder / f"{index:02d}.ply", cloud, row["labels"])

    def _write_cloud(self, target: Path, cloud: Any, labels: Any) -> None:
        """Write points in the colours of their labels, with the names of classes."""
        comments = [f"class {index} {name}" for index, name in enumerate(self.class_names)]
        colours = palette(len(self.class_names))[labels]
        with whole_file(target) as file:
            write_ply(file, cloud.coord, colours, labels, comments)

    def answer(self, row: Row) -> str:
        """Return the classes with their shares of the points, the largest first."""
        shares = sorted(row["shares"].items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares[:MOST])
        return text + f", {len(shares) - MOST} more" * (len(shares) > MOST)

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw each cloud's colours, labels if known, and prediction, from two views."""
        colours = palette(len(self.class_names))
        pictures = []
        answers = self.describe(batch, datamodule)
        for row, number in zip(answers, batch["sample_id"].tolist(), strict=True):
            cloud = datamodule.predicted_cloud(number)
            panels = {} if cloud.color is None else {"colours": cloud.color.astype(np.uint8)}
            present = set(row["labels"].tolist())
            if cloud.labels is not None:
                is_labelled = cloud.labels >= 0
                labels = cloud.labels.clip(0, len(colours) - 1)
                panels["labels"] = np.where(is_labelled[:, None], colours[labels], UNKNOWN)
                present |= set(labels[is_labelled].tolist())
            panels["predicted"] = colours[row["labels"]]
            legend = [
                (self.class_names[label], tuple(colours[label].tolist()))
                for label in sorted(present)
            ]
            pictures.append(draw_cloud(cloud.coord, panels, legend))
        return pictures


def paired(values: Tensor, fill: float) -> Tensor:
    """Join the rows 2i and 2i + 1 of a batch: (B, N, ...) -> (ceil(B / 2), 2 N, ...)."""
    if len(values) % 2:
        values = torch.cat([values, torch.full_like(values[:1], fill)])
    return values.unflatten(0, (-1, 2)).flatten(1, 2)


def _share(part: float, total: float) -> float | None:
    """Return a share in percent; None if the whole is 0."""
    return 100 * part / total if total else None
