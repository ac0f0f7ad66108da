"""A detector as one graph: bytes of images to boxes, scores and labels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.toolkits.graphs import (
    Detections,
    image_bytes,
    image_groups,
    kept_boxes_in_onnx,
    prepared_facts,
)
from tasks.detection.coco_metric import CocoMetric
from tasks.engine.graphs import NotWholeError, WholeGraph

NOWHERE = 2.0  # distance of a detection without a partner


class WholeDetector(WholeGraph):
    """Normalisation, padding, network, decoding and non-maximum suppression.

    Shape: (B, H, W, 3) of bytes in RGB -> boxes (B, N, 4) in pixels of these images, scores and
        labels (B, N), the surest first; the rest has score 0 and label -1.
    """

    outputs = ("boxes", "scores", "labels")
    script = Path(__file__).with_name("infer.py")
    flips = 1e-3
    point = 0.01

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        try:
            self.network = Detections(self.network)
        except ValueError as error:
            raise NotWholeError(str(error)) from error
        self.least = float(self.network.config.get("score_thr", 0))
        self.most = int(self.network.config.max_per_img)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Detect objects in images (B, H, W, 3)."""
        boxes, scores, labels = self.network(images)
        return boxes, scores, labels

    def operators(self) -> dict[Any, Any]:
        """Return non-maximum suppression."""
        return {torch.ops.mixerlab.kept_boxes.default: kept_boxes_in_onnx}

    def prepare(self, task: Any, data: Any) -> None:
        """Give a task the annotations of the data."""
        task.metric = CocoMetric(data.annotations, data.category_ids, with_masks=False)

    def groups(self, batch: Any) -> Sequence[Any]:
        """Divide a batch by the sizes of its images."""
        return image_groups(batch)

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the images."""
        return (image_bytes(batch),)

    def predictions(self, predicted: list[Any], answers: Sequence[Tensor]) -> list[Any]:
        """Return the samples with the graph's detections, in pixels of the original images."""
        samples = [copy.copy(sample) for sample in predicted]
        for sample, boxes, scores, labels in zip(samples, *answers, strict=True):
            exists, factors = labels >= 0, boxes.new_tensor([*sample.scale_factor] * 2)
            sample.pred_instances = type(sample.pred_instances)(
                bboxes=(boxes / factors)[exists], scores=scores[exists], labels=labels[exists]
            )
        return samples

    def differences(self, predicted: list[Any], answers: Sequence[Tensor]) -> Tensor:
        """Return the distance of each detection to the nearest one of the other list.

        A detection that the other list lacks differs by its score above the least kept score.
        """
        parts = []
        for one, other in zip(predicted, self.predictions(predicted, answers), strict=True):
            first, second = one.pred_instances, other.pred_instances
            scale = max(1.0, *first.bboxes.flatten().tolist())
            boxes = torch.cdist(first.bboxes / scale, second.bboxes / scale, p=torch.inf)
            scores = (first.scores[:, None] - second.scores).abs()
            same = first.labels[:, None] == second.labels
            gaps = torch.maximum(boxes, scores).where(same, torch.tensor(NOWHERE))
            for kept, nearest in ((first, _least(gaps, 1)), (second, _least(gaps, 0))):
                is_full = len(kept) == self.most
                floor = kept.scores.min() if is_full else torch.tensor(self.least)
                parts.append(torch.minimum(nearest, kept.scores - floor))
        return torch.cat(parts)

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes, how images are prepared, and the threshold of shown detections."""
        return {**prepared_facts(task), "threshold": task.threshold}


def _least(gaps: Tensor, axis: int) -> Tensor:
    """Return the least gaps along an axis, which may be empty."""
    return (
        gaps.min(axis).values
        if gaps.shape[axis]
        else gaps.new_full((gaps.shape[1 - axis],), NOWHERE)
    )
