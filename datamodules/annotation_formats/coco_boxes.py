"""Unusable boxes of a COCO file, which training and evaluation treat differently.

MMDetection excludes them from training; pycocotools counts them as ground truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.files.folders import first_few
from datamodules.files.values import refuse

OPTION = "data.skip_unusable_boxes=true"
MAX_DEGENERATE_SHARE = 0.1
MARKED, EMPTY, SMALL, OUTSIDE = (
    "marked ignore", "without area", "smaller than a pixel", "outside their image"
)  # fmt: skip


def unusable_boxes(
    annotations: Sequence[Mapping[str, Any]],
    images: Mapping[int, Mapping[str, Any]],
    categories: Collection[int],
) -> dict[int, str]:
    """Return the positions of boxes that MMDetection's CocoDataset drops, with the reason.

    Crowds are usable: they are neither trained on nor counted as missed.

    Args:
        annotations: Annotations with boxes of four numbers.
        images: Images by id.
        categories: Ids of the selected categories.
    """
    if not annotations:
        return {}
    x, y, width, height = np.array([entry["bbox"] for entry in annotations], dtype=np.float64).T
    area = np.array([entry["area"] for entry in annotations], dtype=np.float64)
    sizes = [
        (images[i]["width"], images[i]["height"]) for i in (a["image_id"] for a in annotations)
    ]
    image_width, image_height = np.array(sizes).T
    # Comparisons with NaN are false, so each kind negates the usable case.
    inside = (x < image_width) & (y < image_height) & (x + width > 0) & (y + height > 0)
    kinds = {
        MARKED: np.array([bool(entry.get("ignore")) for entry in annotations]),
        EMPTY: ~((area > 0) & (width > 0) & (height > 0)),
        SMALL: ~((width >= 1) & (height >= 1)),
        OUTSIDE: ~inside,
    }
    reasons: dict[int, str] = {}
    for kind, places in kinds.items():
        for place in np.flatnonzero(places).tolist():
            entry = annotations[place]
            if entry["category_id"] in categories and not entry.get("iscrowd"):
                reasons.setdefault(place, kind)
    return dict(sorted(reasons.items()))


def describe_unusable(
    path: Path,
    annotations: Sequence[Mapping[str, Any]],
    unusable: Mapping[int, str],
    total: int,
    *,
    skip: bool,
) -> str:
    """Return a sentence on the unusable boxes of a file.

    Args:
        path: The json.
        annotations: All its annotations.
        unusable: Result of ``unusable_boxes``.
        total: Number of boxes of the selected categories.
        skip: Exclude the unusable boxes from evaluation, too.

    Raises:
        ValueError: So many boxes are unusable that their unit may be wrong, and ``skip`` is off.
    """
    kinds = Counter(unusable.values())
    ids = first_few(annotations[place]["id"] for place in unusable)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    note = f"{len(unusable)} of {total} boxes in {path} are unusable ({summary}); "
    note += f"annotation ids: {ids}"
    if skip:
        return f"{note}; they are excluded from training and evaluation ({OPTION})"
    rule = (
        "; boxes must be [x, y, width, height] in pixels. If the others are right, "
        f"{OPTION} excludes these from training and evaluation"
    )
    refuse(note, {rule: len(unusable) - kinds[MARKED] > MAX_DEGENERATE_SHARE * total})
    return (
        f"{note}; they are excluded from training and count as missed in evaluation unless found, "
        f"as in pycocotools; {OPTION} excludes them from both"
    )
