"""Boxes of a COCO file that nothing can be learnt from: training and evaluation treat them apart.

MMDetection leaves them out of training, pycocotools counts them as ground truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.files import first_few

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
    """Return the positions of boxes that MMDetection's CocoDataset leaves out, with the reason.

    Crowds are not among them: they are neither learnt nor missed.

    Args:
        annotations: With boxes of four numbers.
        images: By id.
        categories: Ids of the categories that count.
    """
    if not annotations:
        return {}
    x, y, width, height = np.array([one["bbox"] for one in annotations], dtype=np.float64).T
    area = np.array([one["area"] for one in annotations], dtype=np.float64)
    sizes = [
        (images[i]["width"], images[i]["height"]) for i in (a["image_id"] for a in annotations)
    ]
    image_width, image_height = np.array(sizes).T
    # Comparisons with NaN are false, so each kind is what fails to be usable.
    inside = (x < image_width) & (y < image_height) & (x + width > 0) & (y + height > 0)
    kinds = {
        MARKED: np.array([bool(one.get("ignore")) for one in annotations]),
        EMPTY: ~((area > 0) & (width > 0) & (height > 0)),
        SMALL: ~((width >= 1) & (height >= 1)),
        OUTSIDE: ~inside,
    }
    found: dict[int, str] = {}
    for kind, those in kinds.items():
        for place in np.flatnonzero(those).tolist():
            one = annotations[place]
            if one["category_id"] in categories and not one.get("iscrowd"):
                found.setdefault(place, kind)
    return dict(sorted(found.items()))


def note_of(
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
        annotations: All that it has.
        unusable: From ``unusable_boxes``.
        total: Boxes of the categories that count.
        skip: Leave the unusable ones out of evaluation, too.

    Raises:
        ValueError: There are so many that the boxes may be in another unit, and ``skip`` is off.
    """
    kinds = Counter(unusable.values())
    ids = first_few(annotations[place]["id"] for place in unusable)
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    note = f"{len(unusable)} of {total} boxes in {path} are unusable ({what}); "
    note += f"annotation ids: {ids}"
    if skip:
        return f"{note}; they are left out of training and of evaluation ({OPTION})"
    if len(unusable) - kinds[MARKED] > MAX_DEGENERATE_SHARE * total:
        raise ValueError(
            f"{note}; boxes must be [x, y, width, height] in pixels. If the others are right, "
            f"{OPTION} leaves these out of training and evaluation"
        )
    return (
        f"{note}; they are left out of training and count as missed in evaluation unless found, as "
        f"in pycocotools; {OPTION} leaves them out of both"
    )
