"""Detections of a test with the objects that they match, by which AP can be resampled."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from tasks.engine.answers import SampleAnswers

RIGHT, WRONG, UNCOUNTED = 1, 0, -1
MOST = 100  # detections of an image and class that count
ANY_SIZE = [0.0, 1e10]


def box_matches(
    truth: Any,
    results: Any,
    names: Mapping[int, str],
    category_ids: Sequence[int],
) -> SampleAnswers:
    """Match the boxes of images with their objects, by pycocotools, as for AP.

    Args:
        truth: The annotations, as pycocotools' ``COCO``.
        results: The detections, as another.
        names: Name of each evaluated image by its id.
        category_ids: The categories to evaluate.

    Returns:
        Answers with n images, D detections, and C categories: ``objects`` (n, C), the objects that
        count; ``image`` (D,) and ``category`` (D,), the places of a detection's image and category;
        ``score`` (D,); ``match`` (D, 10), whether a detection is right (1), wrong (0) or not
        counted (-1) at an IoU of 0.5, 0.55, ... 0.95.
    """
    from pycocotools.cocoeval import COCOeval

    evaluation = COCOeval(truth, results, "bbox")
    images, categories = sorted(names), sorted(category_ids)
    parameters = evaluation.params
    parameters.imgIds, parameters.catIds = images, categories
    parameters.areaRng, parameters.areaRngLbl, parameters.maxDets = [ANY_SIZE], ["all"], [MOST]
    with redirect_stdout(io.StringIO()):  # it prints its progress
        evaluation.evaluate()
    objects = np.zeros((len(images), len(categories)), np.int32)
    columns: dict[str, list[Any]] = {"image": [], "category": [], "score": [], "match": []}
    places = {image: place for place, image in enumerate(images)}
    for evaluated in filter(None, evaluation.evalImgs):
        image, category = places[evaluated["image_id"]], categories.index(evaluated["category_id"])
        objects[image, category] = np.sum(np.equal(evaluated["gtIgnore"], 0))
        is_right, is_ignored = evaluated["dtMatches"] > 0, evaluated["dtIgnore"].astype(bool)
        match = np.where(is_ignored, UNCOUNTED, np.where(is_right, RIGHT, WRONG)).T
        columns["match"].extend(match)
        columns["score"].extend(evaluated["dtScores"])
        columns["image"].extend([image] * len(match))
        columns["category"].extend([category] * len(match))
    thresholds = len(parameters.iouThrs)
    return SampleAnswers(
        "AP",
        np.array([names[image] for image in images], dtype=str),
        {
            "objects": objects,
            "image": np.array(columns["image"], np.int32),
            "category": np.array(columns["category"], np.int32),
            "score": np.array(columns["score"], np.float64),
            "match": np.array(columns["match"], np.int8).reshape(-1, thresholds),
        },
    )
