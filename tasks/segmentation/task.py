"""Semantic segmentation on ADE20K-format data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from tasks.engine.answers import overlaps
from tasks.engine.batches import Batch, Row, Summed
from tasks.engine.classes import ClassesTask, check_several
from tasks.engine.drawing import draw_bands, open_upright, side_by_side
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.engine.run_folder.predictions import OutputFiles
from tasks.segmentation.family import FAMILY
from tasks.segmentation.segment_drawing import draw_segments, label_map

log_info = rank_zero_only(logging.getLogger(__name__).info)

LABELS = "labels"  # folder of predicted label maps
MOST = 8  # classes of an image listed in a line
IGNORED = 255  # MMSegmentation's label of pixels that do not count


class SegmentationTask(ClassesTask):
    """Segmentation by a model of MMSegmentation; mean IoU, class and pixel accuracy in percent.

    The counts are summed over the whole set before dividing, as in MMSegmentation. The mean skips
    classes that neither occur nor are predicted. The validation loss is the cross entropy of the
    decode head without class weights, so that runs with different training losses compare.
    """

    family = FAMILY
    headline = ("mIoU", "aAcc")
    metric_stores = ("confusion",)

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, class_names, optimizer=optimizer, schedule=schedule, ema=ema)
        check_several(self.class_names, "a class of the other pixels, which 0 would leave ignored")
        self.confusion = MulticlassConfusionMatrix(len(self.class_names), ignore_index=IGNORED)
        self._logged_absent = False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of mean IoU, mean class accuracy and pixel accuracy."""
        return ("mIoU", "mAcc", "aAcc")

    def update_metrics(self, batch: Batch, predictions: list[Any]) -> None:
        """Count pixels by label (rows) and prediction (columns)."""
        for sample in predictions:
            predicted, truth = sample.pred_sem_seg.data, sample.gt_sem_seg.data
            self.confusion.update(predicted.flatten(), truth.to(predicted.device).flatten())

    def sample_values(self, batch: Batch, predictions: list[Any]) -> Tensor:
        """Return the pixels of each image in intersection and union by class (B, 2, C)."""
        classes, counts = len(self.class_names), []
        for sample in predictions:
            predicted, truth = sample.pred_sem_seg.data, sample.gt_sem_seg.data
            counts.append(overlaps(predicted, truth.to(predicted.device), classes, IGNORED))
        return torch.stack(counts)

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return mIoU, mAcc and aAcc in percent."""
        counts = self.confusion.compute().double()
        hits, truth, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        union = truth + predicted - hits
        self._log_absent_classes(truth)
        self.class_figures = [
            {"class": name, "IoU": _share(hit, joint), "Acc": _share(hit, n), "pixels": int(n)}
            for name, hit, joint, n in zip(
                self.class_names, hits.tolist(), union.tolist(), truth.tolist(), strict=True
            )
        ]
        figures = {
            "mIoU": (hits / union)[union > 0].mean(),
            "mAcc": (hits / truth)[truth > 0].mean(),
            "aAcc": hits.sum() / truth.sum(),
        }
        return {name: (100 * value).float() for name, value in figures.items()}

    def _log_absent_classes(self, truth: Tensor) -> None:
        absent = [self.class_names[i] for i in torch.nonzero(truth == 0).flatten().tolist()]
        trainer: Any = self._trainer  # None outside of a run
        warned = getattr(getattr(trainer, "datamodule", None), "warned_absent", False)
        if absent and not (warned or self._logged_absent):
            self._logged_absent = True
            names = ", ".join(absent[:10]) + (", ..." if len(absent) > 10 else "")
            log_info(f"{len(absent)} of {len(truth)} classes do not occur in validation: {names}")

    def evaluation_loss(self, batch: Batch, predictions: list[Any]) -> Summed:
        """Return the summed cross entropy and the number of labelled pixels."""
        losses, counts = [], []
        for sample in predictions:
            logits = sample.seg_logits.data.float()
            labels = sample.gt_sem_seg.data.to(logits.device).long()
            losses.append(
                F.cross_entropy(logits[None], labels, ignore_index=IGNORED, reduction="sum")
            )
            counts.append((labels != IGNORED).sum())
        return torch.stack(losses).sum(), torch.stack(counts).sum()

    def reset_metrics(self) -> None:
        """Reset the counts."""
        self.confusion.reset()

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per image ``input``, its name, ``shares`` of the pixels by class, and ``labels``.

        ``labels`` is a uint8 array (H, W) of indices into ``class_names``.
        """
        results = []
        for sample in self.model.predict(batch):
            predicted = sample.pred_sem_seg.data[0]
            labels, counts = predicted.unique(return_counts=True)
            shares = (counts / counts.sum()).tolist()
            class_shares = {
                self.class_names[i]: round(s, 6)
                for i, s in zip(labels.tolist(), shares, strict=True)
            }
            label_map = predicted.cpu().numpy().astype(np.uint8)
            results.append({"input": sample.img_path, "shares": class_shares, "labels": label_map})
        return results

    def describe_to(self, batch: Batch, datamodule: Any, files: OutputFiles) -> list[Row]:
        """Write the labels of each image to a file, and return its path in place of them."""
        rows = self.describe(batch, datamodule)
        for row in rows:
            target = files.path(LABELS, row["input"], ".png")
            picture = label_map(row["labels"], self.category_ids, datamodule.metainfo["palette"])
            with whole_file(target) as file:
                picture.save(file, "PNG")
            row["labels"] = files.relative(target)
        return rows

    def answer(self, row: Row) -> str:
        """Return the classes with their shares of the pixels, the largest first."""
        shares = sorted(row["shares"].items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares[:MOST])
        return text + f", {len(shares) - MOST} more" * (len(shares) > MOST)

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw per image the labels, if any, and the prediction."""
        draw = partial(
            draw_segments,
            names=self.class_names,
            colours=datamodule.metainfo["palette"],
            background=datamodule.background,
        )
        pictures = []
        for sample in self.model.predict(batch):
            if getattr(datamodule, "bands", None) is None:
                photo = open_upright(sample.img_path)
            else:
                photo = draw_bands(datamodule.load_bands(sample.img_path))
            picture = draw(photo, sample.pred_sem_seg.data[0].cpu().numpy())
            if "gt_sem_seg" in sample:
                truth = draw(photo, sample.gt_sem_seg.data[0].cpu().numpy())
                picture = side_by_side(truth, picture, ("annotated", "predicted"))
            pictures.append(picture)
        return pictures


def _share(part: float, total: float) -> float | None:
    """Return a share in percent; None if the whole is 0."""
    return 100 * part / total if total else None
