"""Content of an export, and its conversion into COCO's form."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.annotation_formats.coco_checks import check_content
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import (
    Box,
    Point,
    bounds,
    mask_bounds,
    run_lengths,
    signed_area,
)
from datamodules.files.console import log
from datamodules.files.folders import first_few

Content = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Shape:
    """An annotated object.

    Attributes:
        label: Name of its class.
        box: x, y, width and height in pixels.
        area: Area in pixels.
        outline: Polygons, or run lengths of the image; empty for a box.
    """

    label: str
    box: Box
    area: float
    outline: Any

    @classmethod
    def from_box(cls, label: str, box: Box) -> Shape:
        """Return a shape without an outline."""
        return cls(label, box, box[2] * box[3], [])

    @classmethod
    def from_polygons(cls, label: str, polygons: Sequence[Sequence[Point]]) -> Shape:
        """Return a shape of one or more polygons."""
        flat = [[float(value) for point in polygon for value in point] for polygon in polygons]
        box = bounds([point for polygon in polygons for point in polygon])
        return cls(label, box, sum(abs(signed_area(outline)) for outline in polygons), flat)

    @classmethod
    def from_mask(cls, label: str, mask: NDArray[np.bool_]) -> Shape:
        """Return the shape of a mask (H, W) of the image."""
        return cls(label, mask_bounds(mask), float(mask.sum()), run_lengths(mask))


@dataclass
class Photo:
    """An image with its shapes.

    Attributes:
        file: Path relative to the export's root.
        shapes: The annotated objects.
        size: Width and height; None reads them from the image.
        labels: File of the image's shapes alone, for messages; None for one of all images.
    """

    file: str
    shapes: list[Shape] = field(default_factory=list)
    size: Size | None = None
    labels: Path | None = None


@dataclass(frozen=True)
class Part:
    """A split of an export in COCO's form.

    Attributes:
        source: File or folder, for messages.
        images: Folder that the images' ``file_name`` are relative to.
        content: Content in the form of ``coco_checks.read_coco``.
        labels: File of an image's objects, by the image's id, where each has its own.
    """

    source: Path
    images: Path
    content: Content
    labels: Mapping[int, Path] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the hash of the content."""
        return hashlib.sha256(json.dumps(self.content).encode()).hexdigest()


# Splits of an export by name; calling one reads it.
Parts = Mapping[str, Callable[[], Part]]


def to_parts(
    splits: Mapping[str, Sequence[Photo]],
    source: Path,
    images: Images,
    names: Sequence[str] | None = None,
) -> Parts:
    """Return splits in COCO's form.

    Args:
        splits: Images per split.
        source: Annotation file or folder, for messages.
        images: Images of the export.
        names: Class names in label order; None sorts the names that occur.
    """
    photos = [photo for split in splits.values() for photo in split]
    if names is None:
        names = sorted({shape.label for photo in photos for shape in photo.shapes})
    if not names:
        raise ValueError(f"{source} lacks annotated boxes and outlines; annotate some images")
    files = {photo.file for photo in photos}
    unlisted = [name for name in images.names if name not in files]
    if unlisted:
        log(
            f"{source}: images without annotations are skipped: {len(unlisted)} of "
            f"{len(images.names)}, such as {first_few(unlisted, 3)}"
        )
    return {name: partial(to_part, split, source, images, names) for name, split in splits.items()}


def to_part(photos: Sequence[Photo], source: Path, images: Images, names: Sequence[str]) -> Part:
    """Return one split in COCO's form; see ``to_parts``."""
    unsized = [photo for photo in photos if photo.size is None]
    for photo, size in zip(unsized, images.sizes([p.file for p in unsized]), strict=True):
        photo.size = size
    ids = {name: number for number, name in enumerate(names)}
    labels = {number: photo.labels for number, photo in enumerate(photos, 1) if photo.labels}
    return Part(source, images.folder, check_content(source, _content(photos, ids)), labels)


def _content(photos: Sequence[Photo], ids: Mapping[str, int]) -> Content:
    content: Content = {
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
        "images": [],
        "annotations": [],
    }
    for image_id, photo in enumerate(photos, 1):
        assert photo.size is not None
        width, height = photo.size
        content["images"].append(
            {"id": image_id, "file_name": photo.file, "width": width, "height": height}
        )
        for shape in photo.shapes:
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": image_id,
                    "category_id": ids[shape.label],
                    "bbox": list(shape.box),
                    "area": shape.area,
                    "iscrowd": 0,
                    "segmentation": shape.outline,
                }
            )
    return content


def report_skipped(source: Path, skipped: Counter[str]) -> None:
    """Log the annotations that are neither boxes nor outlines."""
    if skipped.total():
        kinds = ", ".join(f"{count} {kind}" for kind, count in skipped.most_common())
        log(
            f"{source}: {skipped.total()} annotations are skipped, as they are neither boxes nor "
            f"outlines ({kinds})"
        )


def check_label(label: str, names: Sequence[str]) -> None:
    """Raise an error for a label that the export does not declare."""
    if label not in names:
        raise ValueError(f"label {label!r} must be one of {first_few(names, 10)}")
