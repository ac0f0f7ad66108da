"""COCO average precision by the reference algorithm, over any number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tasks.detection.coco_ranks import RankedTruth
from tasks.detection.matches import box_matches
from tasks.engine.answers import SampleAnswers
from tasks.engine.loops.process_exchange import gather_objects, process_group

# The first six of COCO's twelve figures; the others are recalls.
STATS = ("", "50", "75", "_small", "_medium", "_large")
KINDS = (("bbox", ""), ("segm", "mask_"))
BOX = ("image_id", "category_id", "bbox", "score")


class CocoMetric:
    """COCO average precision of collected detections against annotations.

    faster-coco-eval computes the same as pycocotools (largest difference seen 1.4e-17) in an eighth
    of the time. Each image seen counts once, whatever the number of processes. Ids may be any
    integers, since the evaluation uses their ranks.

    Args:
        annotations: Ground truth, the content of a json in COCO's format.
        category_ids: The json's category id of each label.
        with_masks: Evaluate masks as well as boxes.

    Attributes:
        class_figures: AP and AP50 by category id, of the last ``compute``.
    """

    def __init__(
        self, annotations: Mapping[str, Any], category_ids: Sequence[int], *, with_masks: bool
    ) -> None:
        self.annotations = annotations
        self.category_ids = tuple(category_ids)
        self.with_masks = with_masks
        self.detections: dict[int, list[dict[str, Any]]] = {}
        self.class_figures: dict[int, dict[str, float | None]] = {}

    def reset(self) -> None:
        """Reset the detections."""
        self.detections = {}

    def update(self, samples: Sequence[Any]) -> None:
        """Add mmdet's data samples with ``pred_instances`` at the original image size."""
        for sample in samples:
            self.detections[int(sample.img_id)] = instances(sample, self.category_ids)

    def merge(self, metric: CocoMetric) -> None:
        """Add the detections of another metric for the same data."""
        self.detections |= metric.detections

    def compute(self) -> dict[str, torch.Tensor]:
        """Return AP, AP50, AP75, AP_small/medium/large of boxes; of masks with the prefix "mask_".

        Size ranges without ground truth, for which COCO's own tool gives -1, are left out.

        Raises:
            ValueError: The evaluated images lack ground truth.
        """
        truth, coco = self._truth
        results, places = self._gather()
        images = list(places.values())
        ranks = {category: truth.categories[category] for category in self.category_ids}
        figures = {}
        self.class_figures = {category: {} for category in self.category_ids}
        for kind, prefix in KINDS[: 1 + self.with_masks]:
            stats, classes = average_precisions(coco, results, images, kind, list(ranks.values()))
            if stats[0] < 0:
                raise ValueError(
                    f"AP is undefined: the {len(images)} evaluated images have 0 boxes that count; "
                    "raise trainer.limit_val_batches"
                )
            pairs = zip(STATS, stats, strict=False)
            figures.update({f"{prefix}AP{name}": value for name, value in pairs if value >= 0})
            for category, row in self.class_figures.items():
                of_class = classes.get(ranks[category], (None, None))
                row |= {f"{prefix}AP": of_class[0], f"{prefix}AP50": of_class[1]}
        return {name: torch.tensor(value) for name, value in figures.items()}

    def match(self) -> SampleAnswers:
        """Return the detections with the objects that their boxes match, after ``compute``."""
        truth, coco = self._truth
        results, images = self._gather()
        rows = [{name: row[name] for name in BOX} for row in results]
        files = {entry["id"]: entry.get("file_name") for entry in self.annotations["images"]}
        names = {rank: str(files[image] or image) for image, rank in images.items()}
        categories = [truth.categories[category] for category in self.category_ids]
        return box_matches(coco, loaded(coco, rows), names, categories)

    def _gather(self) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """Return the rows and images of all processes: the rank of each image by its id."""
        parts = gather_objects(self.detections)
        detections = {image: rows for part in parts for image, rows in part.items()}
        truth, _ = self._truth
        rows = truth.rows(row for rows in detections.values() for row in rows)
        return rows, {image: truth.images[image] for image in detections}

    @cached_property
    def _truth(self) -> tuple[RankedTruth, Any]:
        """Return the annotations and the evaluator's ``COCO`` of them, cached."""
        from faster_coco_eval import COCO

        ranked = RankedTruth(self.annotations)
        return ranked, COCO(ranked.content)


class BatchCocoMetric(CocoMetric):
    """COCO average precision against the boxes in the batches themselves, for loaders of any kind.

    Args:
        class_names: Names of the classes, in label order.
        with_masks: Evaluate masks as well as boxes.
    """

    def __init__(self, class_names: Sequence[str], *, with_masks: bool) -> None:
        super().__init__({}, range(1, 1 + len(class_names)), with_masks=with_masks)
        self.class_names = tuple(class_names)
        self.objects: dict[int, list[dict[str, Any]]] = {}

    def reset(self) -> None:
        """Reset the detections and the ground truth."""
        super().reset()
        self.objects = {}

    def update(self, samples: Sequence[Any]) -> None:
        """Add mmdet's data samples with ``pred_instances`` and ``gt_instances``.

        Samples without an id, which is negative, are numbered.
        """
        rank, processes = process_group()
        for sample in samples:
            if int(sample.img_id) < 0:
                number = -1 - len(self.objects) * processes - rank
                sample.set_metainfo({"img_id": number})
            self.objects[int(sample.img_id)] = true_instances(sample, self.category_ids)
        super().update(samples)

    def merge(self, metric: CocoMetric) -> None:
        """Add detections and ground truth of another metric."""
        super().merge(metric)
        self.objects |= metric.objects  # type: ignore[attr-defined]

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the figures of ``CocoMetric``."""
        parts = gather_objects(self.objects)
        objects = {image: rows for part in parts for image, rows in part.items()}
        self.annotations = {
            "images": [{"id": image} for image in objects],
            "annotations": [
                {**row, "id": index}
                for index, row in enumerate(row for rows in objects.values() for row in rows)
            ],
            "categories": [
                {"id": number, "name": name}
                for number, name in zip(self.category_ids, self.class_names, strict=True)
            ],
        }
        self.__dict__.pop("_truth", None)
        return super().compute()


def true_instances(sample: Any, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return an image's annotated objects as COCO annotations without ids.

    They are at the original size, as MMDetection's pipelines for tests load them.
    """
    truth = sample.gt_instances
    boxes = torch.as_tensor(getattr(truth.bboxes, "tensor", truth.bboxes)).cpu().double()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    rows: list[dict[str, Any]] = [
        {
            "image_id": int(sample.img_id),
            "category_id": category_ids[label],
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
        }
        for box, label in zip(boxes.tolist(), truth.labels.tolist(), strict=True)
    ]
    if "masks" in truth:
        for row, mask in zip(rows, truth.masks.to_ndarray(), strict=True):
            row |= {"segmentation": _encode(mask), "area": float(mask.sum())}
    return rows


def average_precisions(
    truth: Any,
    detections: Sequence[Mapping[str, Any]],
    image_ids: Sequence[int],
    kind: str,
    category_ids: Sequence[int],
) -> tuple[list[float], dict[int, tuple[float | None, float | None]]]:
    """Return COCO's figures for detections on some images, and AP and AP50 per category.

    The figures of a category without ground truth are None.

    Args:
        truth: The annotations, as faster_coco_eval's ``COCO``; its ids are numbered from 1.
        detections: COCO result rows.
        image_ids: The images to evaluate.
        kind: "bbox" or "segm".
        category_ids: The categories to evaluate, all or some of the file's.
    """
    from faster_coco_eval import COCOeval_faster

    # If a row has a box, the tool reads the instance's size from it, even for masks.
    left_out = "segmentation" if kind == "bbox" else "bbox"
    rows = [{key: value for key, value in row.items() if key != left_out} for row in detections]
    results = loaded(truth, rows)
    evaluation = COCOeval_faster(truth, results, iouType=kind, print_function=lambda *_: None)
    evaluation.params.imgIds = sorted(image_ids)
    evaluation.params.catIds = sorted(category_ids)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # Axes: thresholds, recalls, categories, sizes (first: all), most detections (last: 100).
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    means = {
        category: (_mean(precision[:, :, place]), _mean(precision[0, :, place]))
        for place, category in enumerate(evaluation.params.catIds)
    }
    return [float(value) for value in evaluation.stats], means


def loaded(truth: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return result rows as a ``COCO`` beside the annotations."""
    from faster_coco_eval import COCO

    # loadRes fails on an empty list.
    return truth.loadRes(rows) if rows else COCO({**truth.dataset, "annotations": []})


def _mean(precisions: Any) -> float | None:
    """Return the mean of precisions where ground truth exists (above -1); None without any."""
    values = precisions[precisions > -1]
    return float(values.mean()) if values.size else None


def instances(sample: Any, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return an image's detections as COCO result rows: boxes (x, y, w, h), masks as RLE."""
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
