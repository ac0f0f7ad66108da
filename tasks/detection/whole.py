"""A detector as one graph: bytes of images to boxes, scores and labels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from heads.toolkits.graphs import (
    detections_of,
    image_bytes,
    image_groups,
    kept_boxes_in_onnx,
    prepared_facts,
)
from tasks.detection.coco_metric import CocoMetric
from tasks.engine.graphs import NotWholeError, WholeGraph

FIELDS = ("labels", "scores", "bboxes", "masks")  # of MMDetection, in the order of the answers
NOWHERE = 2.0  # distance of a detection without a partner
BORDER = 0.02  # share of a mask's pixels that may differ


class WholeDetector(WholeGraph):
    """Normalisation, padding, network, decoding, non-maximum suppression and pasted masks."""

    inputs = ("images", "size")
    script = Path(__file__).with_name("infer.py")
    flips = 1e-3
    point = 0.01

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        try:
            self.network = detections_of(self.network)
        except ValueError as error:
            raise NotWholeError(str(error)) from error
        self.outputs = ("labels", "scores", "boxes", *(["masks"] * self.network.with_masks))

    def forward(self, images: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        """Detect objects in images (B, H, W, 3) of the original ``size`` (2,)."""
        answers: tuple[Tensor, ...] = self.network(images, size)
        return answers

    def operators(self) -> dict[Any, Any]:
        """Return non-maximum suppression."""
        return {torch.ops.mixerlab.kept_boxes.default: kept_boxes_in_onnx}

    def prepare(self, task: Any, data: Any) -> None:
        """Give a task the annotations of the data."""
        with_masks = self.network.with_masks
        task.metric = CocoMetric(data.annotations, data.category_ids, with_masks=with_masks)

    def groups(self, batch: Any) -> Sequence[Any]:
        """Divide a batch by the sizes of its images, resized and original."""
        return image_groups(batch, "ori_shape")

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the images and their original height and width."""
        return image_bytes(batch), torch.tensor(batch["data_samples"][0].metainfo["ori_shape"][:2])

    def predictions(self, predicted: list[Any], answers: Sequence[Tensor]) -> list[Any]:
        """Return the samples with the graph's detections."""
        samples = [copy.copy(sample) for sample in predicted]
        for sample, fields in zip(samples, _fields(answers), strict=True):
            sample.pred_instances = type(sample.pred_instances)(**fields)
        return samples

    def differences(self, predicted: list[Any], answers: Sequence[Tensor]) -> Tensor:
        """Return how far each detection is from those of the other list; see ``gaps``."""
        least, most = self.network.least, self.network.most
        pairs = zip(predicted, self.predictions(predicted, answers), strict=True)
        lists = [(sample.pred_instances, answer.pred_instances) for sample, answer in pairs]
        return torch.cat([gaps(*pair, least, most) for pair in lists])

    def choices(self, expected: Sequence[Tensor], answers: Sequence[Tensor]) -> Tensor:
        """Return how far each detection is from those of the other list; see ``gaps``."""
        least, most = self.network.least, self.network.most
        pairs = zip(_fields(expected), _fields(answers), strict=True)
        lists = [(SimpleNamespace(**before), SimpleNamespace(**after)) for before, after in pairs]
        return torch.cat([gaps(*pair, least, most) for pair in lists])

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes, how images are prepared, and the threshold of shown detections."""
        return {**prepared_facts(task), "threshold": task.threshold}


def _fields(answers: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return the detections of each image by MMDetection's names, without unused places."""
    images = zip(*answers, strict=True)
    return [
        {name: row[rows[0] >= 0] for name, row in zip(FIELDS, rows, strict=False)}
        for rows in images
    ]


def gaps(first: Any, second: Any, least: float, most: int) -> Tensor:
    """Return the distance of each detection to the nearest one of its class in the other list.

    Distances are the largest of score, sides relative to the largest one, and share of the mask. A
    detection that the other list lacks differs by its score above the least that a list keeps.

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
    if hasattr(first, "masks") and distances.numel():
        near = distances.argmin(1)
        union, shared = (
            operation(first.masks, second.masks[near]).flatten(1).sum(1)
            for operation in (torch.logical_or, torch.logical_and)
        )
        # Rounding decides on pixels at the border of a mask.
        mask_gaps = (1 - shared / union.clamp(min=1) - BORDER).clamp(min=0) * (union > 0)
        rows = torch.arange(len(near))
        distances[rows, near] = torch.maximum(distances[rows, near], mask_gaps)
    parts = []
    for axis, objects in ((1, first), (0, second)):
        nowhere = distances.new_full((len(objects.scores),), NOWHERE)
        nearest = distances.amin(axis) if distances.shape[axis] else nowhere
        is_full = len(objects.scores) >= most
        floor = float(objects.scores.min()) if is_full else least
        parts.append(torch.minimum(nearest, objects.scores - floor))
    return torch.cat(parts)
