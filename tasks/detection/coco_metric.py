"""COCO average precision by the reference algorithm, over any number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tasks.detection.coco_ranks import RankedTruth
from tasks.engine.gather import gather_objects

# The first six of COCO's twelve figures; the others are recalls.
STATS = ("", "50", "75", "_small", "_medium", "_large")
KINDS = (("bbox", ""), ("segm", "mask_"))


class CocoMetric:
    """Collects detections and evaluates them against annotations.

    faster-coco-eval computes what pycocotools does (largest difference seen 1.4e-17) in an eighth
    of the time. Each image counts once, however many processes saw it, and images not seen do not
    count. Ids may be any integers: the evaluation itself sees their ranks.

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
        self.of_classes: dict[int, dict[str, float | None]] = {}

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

        Raises:
            ValueError: The images seen have no ground truth at all.
        """
        parts = gather_objects(self.detections)
        detections = {image: rows for part in parts for image, rows in part.items()}
        truth, coco = self._truth
        found = truth.rows(row for rows in detections.values() for row in rows)
        images = [truth.images[image] for image in detections]
        ranks = {category: truth.categories[category] for category in self.category_ids}
        figures = {}
        self.of_classes = {category: {} for category in self.category_ids}
        for kind, prefix in KINDS[: 1 + self.with_masks]:
            stats, classes = average_precisions(coco, found, images, kind, list(ranks.values()))
            if stats[0] < 0:
                raise ValueError(
                    f"AP has no value: {len(images)} images were evaluated and have no box that "
                    "counts; raise trainer.limit_val_batches"
                )
            named = zip(STATS, stats, strict=False)
            figures.update({f"{prefix}AP{name}": value for name, value in named if value >= 0})
            for category, row in self.of_classes.items():
                of_class = classes.get(ranks[category], (None, None))
                row |= {f"{prefix}AP": of_class[0], f"{prefix}AP50": of_class[1]}
        return {name: torch.tensor(value) for name, value in figures.items()}

    @cached_property
    def _truth(self) -> tuple[RankedTruth, Any]:
        """The annotations and, made of them, the evaluator's ``COCO``; kept for all evaluations."""
        from faster_coco_eval import COCO

        ranked = RankedTruth(self.annotations)
        return ranked, COCO(ranked.content)


def average_precisions(
    truth: Any,
    found: Sequence[Mapping[str, Any]],
    image_ids: Sequence[int],
    kind: str,
    category_ids: Sequence[int],
) -> tuple[list[float], dict[int, tuple[float | None, float | None]]]:
    """COCO's figures for detections on some images, and each category's AP and AP50.

    A category without ground truth on them has none.

    Args:
        truth: The annotations, as faster_coco_eval's ``COCO``; its ids are numbered from 1.
        found: Result rows.
        image_ids: The images that count.
        kind: "bbox" or "segm".
        category_ids: The categories that count; a set may be restricted to some of its file's.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    # With boxes in the rows the tool would take an instance's size from its box, masks or not.
    left_out = "segmentation" if kind == "bbox" else "bbox"
    rows = [{key: value for key, value in row.items() if key != left_out} for row in found]
    # loadRes needs a row.
    results = truth.loadRes(rows) if rows else COCO({**truth.dataset, "annotations": []})
    evaluation = COCOeval_faster(truth, results, iouType=kind, print_function=lambda *_: None)
    evaluation.params.imgIds = sorted(image_ids)
    evaluation.params.catIds = sorted(category_ids)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # Thresholds, recalls, categories, sizes (the first is all), most detections (the last is 100).
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    means = {
        category: (_mean(precision[:, :, place]), _mean(precision[0, :, place]))
        for place, category in enumerate(evaluation.params.catIds)
    }
    return [float(value) for value in evaluation.stats], means


def _mean(precisions: Any) -> float | None:
    """Of the precisions where there is ground truth; None where there is none."""
    known = precisions[precisions > -1]
    return float(known.mean()) if known.size else None


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
