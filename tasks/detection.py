"""Object detection and instance segmentation on COCO-format data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from tasks.base import BaseTask, Batch
from tasks.coco_metric import KINDS, STATS, CocoMetric, instances
from tasks.drawing import draw_instances, open_upright, side_by_side

PREVIEW_SCORE = 0.3


class DetectionTask(BaseTask):
    """A detector of MMDetection; COCO's average precision for boxes and, where predicted, masks.

    The datamodule tells the ground truth: ``annotation_file`` and ``category_ids``.
    """

    monitor = "val/AP50"
    headline = ("AP", "AP50", "mask_AP")
    metric: CocoMetric

    def setup(self, stage: str) -> None:
        """Ask the datamodule for the ground truth."""
        trainer: Any = self.trainer
        data = trainer.datamodule
        with_masks = bool(getattr(self.model.model, "with_mask", False))
        self.metric = CocoMetric(data.annotation_file, data.category_ids, with_masks=with_masks)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """COCO's precisions of boxes, and of masks where the model has them."""
        with_masks = bool(getattr(self.model.model, "with_mask", False))
        return tuple(f"{prefix}AP{end}" for _, prefix in KINDS[: 1 + with_masks] for end in STATS)

    def update_metrics(self, batch: Batch, predictions: list[Any]) -> None:
        """Take in the detections."""
        self.metric.update(predictions)

    def compute_metrics(self) -> dict[str, torch.Tensor]:
        """COCO's figures, in [0, 1]."""
        return {name: value.to(self.device) for name, value in self.metric.compute().items()}

    def reset_metrics(self) -> None:
        """Forget all detections."""
        self.metric.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """COCO result rows of each image, with class names in place of ids."""
        labels = range(len(self.class_names))
        results = []
        for sample in self.model.predict(batch):
            rows = instances(sample, labels)
            for row in rows:
                row["class"] = self.class_names[row.pop("category_id")]
                row.pop("image_id")
            results.append({"image": sample.img_path, "detections": rows})
        return results

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Per image: the ground truth where there is one, and detections above a score of 0.3."""
        truths = [sample.get("gt_instances") for sample in batch["data_samples"]]
        pictures = []
        for sample, truth in zip(self.model.predict(batch), truths, strict=True):
            photo = open_upright(sample.img_path)
            found = sample.pred_instances[sample.pred_instances.scores > PREVIEW_SCORE].cpu()
            captions = [
                f"{self.class_names[label]} {score:.2f}"
                for label, score in zip(found.labels.tolist(), found.scores.tolist(), strict=True)
            ]
            masks = found.masks.numpy() if "masks" in found else None
            drawn = draw_instances(
                photo, found.bboxes.tolist(), found.labels.tolist(), captions, masks
            )
            if truth is not None and len(truth):
                drawn = side_by_side(
                    self._draw_truth(photo, truth), drawn, ("annotated", "predicted")
                )
            pictures.append(drawn)
        return pictures

    def _draw_truth(self, photo: Image.Image, truth: Any) -> Image.Image:
        boxes = getattr(truth.bboxes, "tensor", truth.bboxes)
        labels = truth.labels.tolist()
        masks = truth.masks.to_ndarray().astype(bool) if "masks" in truth else None
        names = [self.class_names[label] for label in labels]
        return draw_instances(photo, np.asarray(boxes.cpu()).tolist(), labels, names, masks)
