"""COCO's breakdown of a detector's errors: precision over recall as kinds of error are forgiven.

    C75, C50   as evaluated, at an IoU of 0.75 and 0.5
    Loc        at 0.1: localisation errors forgiven
    Sim        and boxes on other classes of the same supercategory ignored
    Oth        and boxes on any other class ignored
    BG         and boxes on background ignored
    FN         and missed objects found: 1

Source: "Analyze errors" of https://cocodataset.org/#detection-eval and its analyzeResults, after
Hoiem et al., "Diagnosing Error in Object Detectors", ECCV 2012; 100 boxes per image, all sizes.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.detection.coco_ranks import RankedTruth

KINDS = ("C75", "C50", "Loc", "Sim", "Oth", "BG", "FN")
Array = NDArray[np.float64]


def precision_curves(
    annotations: Mapping[str, Any],
    predictions: Sequence[Mapping[str, Any]],
    image_ids: Sequence[int],
    category_ids: Sequence[int] | None = None,
) -> dict[int, Array]:
    """Return the precision at 101 recalls for each of ``KINDS``, (7, 101), by category id.

    Args:
        annotations: Content of a json in COCO's format; ids may be any integers.
        predictions: Result rows with ``image_id``, ``category_id``, ``bbox`` and ``score``.
        image_ids: The images to evaluate.
        category_ids: The categories to evaluate; default: all.

    Returns:
        Curves of the categories that occur on these images.
    """
    truth = RankedTruth(annotations)
    content = truth.content
    numbers = {truth.images[image] for image in image_ids}
    chosen_ids = truth.categories if category_ids is None else category_ids
    ranks = {category: truth.categories[category] for category in chosen_ids}
    counted = set(ranks.values())
    images = [image for image in content["images"] if image["id"] in numbers]
    categories = [category for category in content["categories"] if category["id"] in counted]
    objects = [
        item
        for item in content["annotations"]
        if item["image_id"] in numbers and item["category_id"] in counted
    ]
    above = {category["id"]: category.get("supercategory") for category in categories}
    detections = truth.rows(predictions)
    curves = {}
    for category, rank in ranks.items():
        if not any(item["category_id"] == rank and not item["iscrowd"] for item in objects):
            continue
        rows = [row for row in detections if row["category_id"] == rank]
        similar = {c for c, group in above.items() if group is not None and group == above[rank]}
        precisions = _precisions(images, categories, objects, rows, rank, (0.75, 0.5, 0.1))
        forgiven = [
            _precisions(images, categories, _ignored(objects, rank, classes), rows, rank, (0.1,))[0]
            for classes in (similar, set(above))
        ]
        background = (forgiven[1] > 0).astype(np.float64)
        curves[category] = np.stack([*precisions, *forgiven, background, np.ones_like(background)])
    return curves


def _ignored(
    objects: Sequence[Mapping[str, Any]], rank: int, classes: set[int]
) -> list[dict[str, Any]]:
    """Return the objects, with those of other classes turned into ignored ones of this class."""
    return [
        {**item, "category_id": rank, "iscrowd": 1, "ignore": 1}
        if item["category_id"] in classes and item["category_id"] != rank
        else dict(item)
        for item in objects
    ]


def _precisions(
    images: Sequence[Mapping[str, Any]],
    categories: Sequence[Mapping[str, Any]],
    objects: Sequence[Mapping[str, Any]],
    rows: Sequence[dict[str, Any]],
    category: int,
    thresholds: Sequence[float],
) -> Array:
    """Compute the precision at 101 recalls with pycocotools, (thresholds, 101)."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not rows:
        return np.zeros((len(thresholds), 101))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy({
            "images": list(images), "categories": list(categories),
            "annotations": list(objects),
        })  # fmt: skip
        truth.createIndex()
        boxes = [{key: row[key] for key in ("image_id", "category_id", "bbox", "score")}
                 for row in rows]  # fmt: skip
        evaluation = COCOeval(truth, truth.loadRes(boxes), "bbox")
        evaluation.params.catIds = [category]
        evaluation.params.iouThrs = np.array(thresholds)
        evaluation.params.maxDets = [100]
        evaluation.params.areaRng = [[0, 1e10]]
        evaluation.params.areaRngLbl = ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precisions: Array = evaluation.eval["precision"][:, :, 0, 0, 0]
    return precisions.clip(min=0)
