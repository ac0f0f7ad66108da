"""COCO average precision by the reference algorithm, over any number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tasks.gather import gather_objects

# The first six of COCO's twelve figures; the others are recalls.
STATS = ("", "50", "75", "_small", "_medium", "_large")
KINDS = (("bbox", ""), ("segm", "mask_"))


class CocoMetric:
    """Collects detections and evaluates them against annotations.

    faster-coco-eval computes what pycocotools does (largest difference seen 1.4e-17) in an eighth
    of the time. Each image counts once, however many processes saw it, and images not seen do not
    count.

    Args:
        annotations: Ground truth, the content of a json in COCO's format.
        category_ids: The json's category id of each label.
        with_masks: Whether to evaluate masks as well as boxes.
    """

    def __init__(
        self, annotations: Mapping[str, Any], category_ids: Sequence[int], *, with_masks: bool
    ) -> None:
        self.annotations = annotations
        self.category_ids = tuple(category_ids)
        self.with_masks = with_masks
        self.detections: dict[int, list[dict[str, Any]]] = {}

    def reset(self) -> None:
        """Forget all detections."""
        self.detections = {}

    def update(self, samples: Sequence[Any]) -> None:
        """Take in mmdet's data samples with ``pred_instances`` at the original image size."""
        for sample in samples:
            self.detections[int(sample.img_id)] = instances(sample, self.category_ids)

    def compute(self) -> dict[str, torch.Tensor]:
        """AP, AP50, AP75, AP_small/medium/large of boxes, and of masks with the prefix "mask_".

        A size range without ground truth, for which COCO's own tool gives -1, has no figure.
        """
        parts = gather_objects(self.detections)
        detections = {image: rows for part in parts for image, rows in part.items()}
        found = [row for rows in detections.values() for row in rows]
        figures = {}
        for kind, prefix in KINDS[: 1 + self.with_masks]:
            stats = average_precisions(self._truth, found, sorted(detections), kind)
            named = zip(STATS, stats, strict=False)
            figures.update({f"{prefix}AP{name}": value for name, value in named if value >= 0})
        return {name: torch.tensor(value) for name, value in figures.items()}

    @cached_property
    def _truth(self) -> Any:
        """The annotations with an index, which all evaluations of a run share."""
        from faster_coco_eval import COCO

        return COCO(dict(self.annotations))


def average_precisions(
    truth: Any, found: Sequence[Mapping[str, Any]], image_ids: Sequence[int], kind: str
) -> list[float]:
    """COCO's figures for detections on some images.

    Args:
        truth: The annotations, as faster_coco_eval's ``COCO``.
        found: Result rows.
        image_ids: The images that count.
        kind: "bbox" or "segm".
    """
    from faster_coco_eval import COCOeval_faster

    if not found:
        return [0.0] * 3
    # With boxes in the rows the tool would take an instance's size from its box, masks or not.
    left_out = "segmentation" if kind == "bbox" else "bbox"
    rows = [{key: value for key, value in row.items() if key != left_out} for row in found]
    evaluation = COCOeval_faster(
        truth, truth.loadRes(rows), iouType=kind, print_function=lambda *_: None
    )
    evaluation.params.imgIds = list(image_ids)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [float(value) for value in evaluation.stats]


def instances(sample: Any, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """One image's detections as COCO result rows: box as (x, y, width, height), mask as RLE."""
    predicted = sample.pred_instances
    boxes = predicted.bboxes.cpu().double()
    boxes[:, 2:] -= boxes[:, :2]
    rows = [
        {
            "image_id": int(sample.img_id),
            "category_id": category_ids[label],
            "bbox": box,
            "score": score,
        }
        for box, label, score in zip(
            boxes.tolist(), predicted.labels.tolist(), predicted.scores.tolist(), strict=True
        )
    ]
    if "masks" in predicted:
        for row, mask in zip(rows, predicted.masks, strict=True):
            row["segmentation"] = _encode(mask)
    return rows


def _encode(mask: Any) -> dict[str, Any]:
    from pycocotools import mask as coco_mask

    array = mask.cpu().numpy() if isinstance(mask, torch.Tensor) else mask
    encoded = coco_mask.encode(np.asfortranarray(array, dtype=np.uint8))
    return {"size": list(encoded["size"]), "counts": encoded["counts"].decode("ascii")}
