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
        """Return how far each detection is from those of the other list; see ``gaps``."""
        pairs = zip(predicted, self.predictions(predicted, answers), strict=True)
        lists = [(sample.pred_instances, answer.pred_instances) for sample, answer in pairs]
        return torch.cat([gaps(*pair, self.least, self.most) for pair in lists])

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes, how images are prepared, and the threshold of shown detections."""
        return {**prepared_facts(task), "threshold": task.threshold}


def gaps(first: Any, second: Any, least: float, most: int) -> Tensor:
    """Return the distance of each detection to the nearest one of its class in the other list.

    Distances are the largest of score and sides, these relative to the largest side. A detection
    that the other list lacks differs by its score above the least that a list keeps.

    Args:
        first: ``bboxes``, ``scores`` and ``labels`` of an image.
        second: The other list.
        least: Scores are above it.
        most: Detections of a full list.

    Returns:
        Those of the first list, then those of the second.
    """
    scale = max(1.0, *first.bboxes.flatten().tolist(), 1.0)
    sides = torch.cdist(first.bboxes / scale, second.bboxes / scale, p=torch.inf)
    scores = (first.scores[:, None] - second.scores).abs()
    is_same = first.labels[:, None] == second.labels
    distances = torch.maximum(sides, scores).where(is_same, torch.tensor(NOWHERE))
    parts = []
    for axis, objects in ((1, first), (0, second)):
        nowhere = distances.new_full((len(objects.scores),), NOWHERE)
        nearest = distances.amin(axis) if distances.shape[axis] else nowhere
        is_full = len(objects.scores) >= most
        floor = float(objects.scores.min()) if is_full else least
        parts.append(torch.minimum(nearest, objects.scores - floor))
    return torch.cat(parts)
