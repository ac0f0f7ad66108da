"""Ranks that replace the ids of a COCO file for COCO's evaluators: from 1, in the ids' order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class RankedTruth:
    """Content of a COCO file with ranks in place of its ids.

    The evaluators read annotation id 0 as "no match" and store ids in 64 bits. The order of image
    ids decides between detections of equal score; ranks preserve it.

    Attributes:
        content: Images, annotations and categories in the file's order, with ranks as ids.
        images: The rank of each image id.
        categories: The rank of each category id.

    Args:
        content: Content of a json in COCO's format; ids may be any integers.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.images, self.categories = _ranks(content["images"]), _ranks(content["categories"])
        annotations = _ranks(content["annotations"])
        self.content: dict[str, Any] = {
            "images": [{**entry, "id": self.images[entry["id"]]} for entry in content["images"]],
            "categories": [
                {**entry, "id": self.categories[entry["id"]]} for entry in content["categories"]
            ],
            "annotations": [
                {**entry, "id": annotations[entry["id"]], "iscrowd": int(entry.get("iscrowd", 0))}
                for entry in self.rows(content["annotations"])
            ],
        }

    def rows(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return annotations or result rows with the ranks of their images and categories."""
        return [
            {
                **row,
                "image_id": self.images[row["image_id"]],
                "category_id": self.categories[row["category_id"]],
            }
            for row in rows
        ]


def _ranks(entries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    return {number: rank for rank, number in enumerate(sorted(e["id"] for e in entries), start=1)}
