"""LabelMe's JSON files, one beside each image."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, FiniteFloat, Strict

from datamodules.annotation_formats.coco_files import WHOLE
from datamodules.annotation_formats.coco_records import (
    Parts,
    Photo,
    Shape,
    report_skipped,
    to_parts,
)
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import Point, blank_mask, bounds, ellipse
from datamodules.files.decoding import decode_bytes
from datamodules.files.folders import list_folders
from datamodules.files.text_files import read_json, read_lines, text_start
from datamodules.files.values import file_errors, refuse

KEYS = ('"shapes"', '"imagePath"')
NAMES = "labels.txt"
UNUSED = ("__ignore__", "_background_")  # entries of labels.txt that are not classes
BEGINNING, END = 2**16, 2**16
REMEDY = "copy the images beside their json files"
Coordinate = Annotated[FiniteFloat, Strict()]


class Outline(BaseModel):
    """An annotated object."""

    label: str
    points: list[tuple[Coordinate, Coordinate]]
    shape_type: str | None = None
    group_id: object = None
    mask: str | None = None


class LabelMeFile(BaseModel):
    """Content of a file; older versions lack the size."""

    imagePath: str
    imageWidth: Annotated[int, Strict()] | None = None
    imageHeight: Annotated[int, Strict()] | None = None
    shapes: list[Outline]

    @property
    def size(self) -> Size | None:
        """Width and height, if annotated."""
        if self.imageWidth is None or self.imageHeight is None:
            return None
        return self.imageWidth, self.imageHeight


OUTLINES = ("polygon", "rectangle", "oriented_rectangle", "circle", "ellipse", "mask")


def find(root: Path) -> dict[str, list[Path]]:
    """Return the files per split: those of the root, or of each of its folders."""
    root_files = _files(root, ("*.json",))
    if root_files:
        return {WHOLE: root_files}
    splits = {name: _files(root / name) for name in list_folders(root)}
    return {name: files for name, files in splits.items() if files}


def _files(folder: Path, looked: Sequence[str] = ("*.json", "*/*.json")) -> list[Path]:
    """Return the JSON files of a folder and its sub-folders, if the first is LabelMe's."""
    first = next((file for pattern in looked for file in sorted(folder.glob(pattern))), None)
    if first is None or not _is_labelme(first):
        return []
    return sorted(file for file in folder.rglob("*.json") if not file.name.startswith("."))


def _is_labelme(file: Path) -> bool:
    """Return True if a file's start and end have LabelMe's keys; pixels may lie between them."""
    with file.open("rb") as opened_file:
        beginning = opened_file.read(BEGINNING)
        opened_file.seek(max(0, file.stat().st_size - END))
        text = text_start(beginning + opened_file.read())
    return text.startswith("{") and all(key in text for key in KEYS)


def convert(root: Path, splits: dict[str, list[Path]]) -> Parts:
    """Return the splits of an export."""
    images, skipped = Images(root), Counter[str]()
    photos = {name: _photos(files, images, skipped) for name, files in splits.items()}
    report_skipped(root, skipped)
    return to_parts(photos, root, images, _names(root, photos))


def _names(root: Path, splits: dict[str, list[Photo]]) -> list[str] | None:
    """Return the classes of labels.txt; None if the file is missing."""
    file = root / NAMES
    if not file.is_file():
        return None
    names = [line for line in read_lines(file) if line and line not in UNUSED]
    used = {shape.label for photos in splits.values() for photo in photos for shape in photo.shapes}
    refuse(file, {"lacks labels; add them": sorted(used - set(names))})
    return names


def _photos(files: Sequence[Path], images: Images, skipped: Counter[str]) -> list[Photo]:
    photos, missing = [], []
    for file in files:
        with file_errors(file):
            entry = LabelMeFile.model_validate(read_json(file))
        folder = file.parent.relative_to(images.folder).as_posix()
        near = ["" if folder == "." else folder]
        # The path is relative to the file, but may come from another machine.
        name = images.find(entry.imagePath, near) or images.find_stem(file.stem, near)
        if name is None:
            missing.append(f"{entry.imagePath} ({file.name})")
            continue
        photos.append(Photo(name, _shapes(entry, str(file), skipped), entry.size, file))
    images.require_found(missing, files[0].parent, REMEDY)
    return photos


def _shapes(entry: LabelMeFile, where: str, skipped: Counter[str]) -> list[Shape]:
    """Return the objects of an image; polygons of equal group and label form one object."""
    groups: dict[tuple[str, int], list[list[Point]]] = {}
    shapes = []
    for place, outline in enumerate(entry.shapes):
        label, kind = outline.label, outline.shape_type or "polygon"
        if label in UNUSED or kind not in OUTLINES:
            skipped[label if label in UNUSED else str(kind)] += 1
        elif kind == "polygon" and len(outline.points) < 3:
            skipped["polygon with fewer than three corners"] += 1
        elif kind == "polygon" and isinstance(outline.group_id, int):
            groups.setdefault((label, outline.group_id), []).append([*outline.points])
        else:
            with file_errors(f"{where}: shapes[{place}]"):
                shapes.append(_shape(outline, kind, entry.size))
    return shapes + [Shape.from_polygons(label, parts) for (label, _), parts in groups.items()]


def _shape(outline: Outline, kind: str, size: Size | None) -> Shape:
    label, corners = outline.label, outline.points
    if len(corners) < (2 if kind != "oriented_rectangle" else 4):
        raise ValueError(f"a {kind} must have more than {len(corners)} points")
    if kind == "mask":
        return _mask(outline, size)
    if kind == "circle":
        radius = math.dist(corners[0], corners[1])
        return Shape.from_polygons(label, [ellipse(corners[0], (radius, radius))])
    if kind == "ellipse":
        x_min, top, width, height = bounds(corners)
        centre = (x_min + width / 2, top + height / 2)
        return Shape.from_polygons(label, [ellipse(centre, (width / 2, height / 2))])
    if kind == "rectangle":
        return Shape.from_box(label, bounds(corners))
    return Shape.from_polygons(label, [corners])


def _mask(outline: Outline, size: Size | None) -> Shape:
    """Return the shape of a base64 PNG that fills the box between the first two points."""
    picture = decode_bytes(base64.b64decode(outline.mask or "", validate=True), "its mask")
    window: NDArray[np.bool_] = np.asarray(picture.convert("L")) > 0
    x_min, top = (round(value) for value in outline.points[0])
    height, width = window.shape
    across, down = size or (0, 0)
    if not (0 <= x_min and 0 <= top and x_min + width <= across and top + height <= down):
        raise ValueError(
            f"a mask of {width}x{height} pixels at {x_min}, {top} exceeds the image of "
            f"imageWidth x imageHeight = {across}x{down}"
        )
    mask = blank_mask((across, down))
    mask[top : top + height, x_min : x_min + width] = window
    return Shape.from_mask(outline.label, mask)
