"""LabelMe's JSON files, one beside each image."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.files.folders import list_folders
from datamodules.files.text_files import read_json, read_lines, text_start
from datamodules.layouts import WHOLE
from datamodules.layouts.coco_records import Parts, Photo, Shape, report_skipped, to_parts
from datamodules.layouts.image_lookup import Images, Size
from datamodules.layouts.json_files import get_points, get_value
from datamodules.layouts.outlines import Point, blank_mask, bounds, ellipse

KEYS = ('"shapes"', '"imagePath"')
NAMES = "labels.txt"
UNUSED = ("__ignore__", "_background_")  # entries of labels.txt that are not classes
BEGINNING, END = 2**16, 2**16
REMEDY = "copy the images beside their json files"
OUTLINES = ("polygon", "rectangle", "oriented_rectangle", "circle", "ellipse", "mask")


def find(root: Path) -> dict[str, list[Path]]:
    """Return the files per split: those of the root, or of each of its folders."""
    whole = _files(root, ("*.json",))
    if whole:
        return {WHOLE: whole}
    found = {name: _files(root / name) for name in list_folders(root)}
    return {name: files for name, files in found.items() if files}


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
    used = {shape.label for photos in splits.values() for one in photos for shape in one.shapes}
    if used - set(names):
        raise ValueError(f"{file} lacks the labels {sorted(used - set(names))}; add them")
    return names


def _photos(files: Sequence[Path], images: Images, skipped: Counter[str]) -> list[Photo]:
    photos, missing = [], []
    for file in files:
        entry, where = read_json(file), str(file)
        named = get_value(entry, "imagePath", str, where)
        folder = file.parent.relative_to(images.folder).as_posix()
        near = ["" if folder == "." else folder]
        # The path is relative to the file, but may come from another machine.
        name = images.find(named, near) or images.find_stem(file.stem, near)
        if name is None:
            missing.append(f"{named} ({file.name})")
            continue
        photos.append(Photo(name, _shapes(entry, where, skipped), _size(entry, where)))
    images.require_found(missing, files[0].parent, REMEDY)
    return photos


def _size(entry: Any, where: str) -> Size | None:
    """Return the annotated width and height; None in files of older versions."""
    if entry.get("imageWidth") is None or entry.get("imageHeight") is None:
        return None
    return get_value(entry, "imageWidth", int, where), get_value(entry, "imageHeight", int, where)


def _shapes(entry: Any, where: str, skipped: Counter[str]) -> list[Shape]:
    """Return the objects of an image; polygons of equal group and label form one object."""
    groups: dict[tuple[str, int], list[list[Point]]] = {}
    shapes = []
    for place, one in enumerate(get_value(entry, "shapes", list, where)):
        here = f"{where}: shapes[{place}]"
        label, kind = get_value(one, "label", str, here), one.get("shape_type") or "polygon"
        if label in UNUSED or kind not in OUTLINES:
            skipped[label if label in UNUSED else str(kind)] += 1
            continue
        corners, group = get_points(one, here), one.get("group_id")
        if kind == "polygon" and len(corners) < 3:
            skipped["polygon with fewer than three corners"] += 1
        elif kind == "polygon" and isinstance(group, int):
            groups.setdefault((label, group), []).append(corners)
        else:
            shapes.append(_shape(label, kind, corners, one, _size(entry, where), here))
    return shapes + [Shape.from_polygons(label, parts) for (label, _), parts in groups.items()]


def _shape(
    label: str, kind: str, corners: list[Point], one: Any, size: Size | None, where: str
) -> Shape:
    if len(corners) < (2 if kind != "oriented_rectangle" else 4):
        raise ValueError(f"{where}: a {kind} must have more than {len(corners)} points")
    if kind == "mask":
        return _mask(label, corners, one, size, where)
    if kind == "circle":
        radius = math.dist(corners[0], corners[1])
        return Shape.from_polygons(label, [ellipse(corners[0], (radius, radius))])
    if kind == "ellipse":
        left, top, width, height = bounds(corners)
        centre = (left + width / 2, top + height / 2)
        return Shape.from_polygons(label, [ellipse(centre, (width / 2, height / 2))])
    if kind == "rectangle":
        return Shape.from_box(label, bounds(corners))
    return Shape.from_polygons(label, [corners])


def _mask(label: str, corners: list[Point], one: Any, size: Size | None, where: str) -> Shape:
    """Return the shape of a base64 PNG that fills the box between the first two points."""
    try:
        raw = base64.b64decode(get_value(one, "mask", str, where), validate=True)
        with Image.open(io.BytesIO(raw)) as picture:
            window: NDArray[np.bool_] = np.asarray(picture.convert("L")) > 0
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: its mask is not a PNG in base64 ({error})") from None
    left, top = (round(value) for value in corners[0])
    if size is None:
        raise ValueError(f"{where}: a mask needs imageWidth and imageHeight")
    height, width = window.shape
    if not (0 <= left and 0 <= top and left + width <= size[0] and top + height <= size[1]):
        raise ValueError(
            f"{where}: a mask of {width}x{height} pixels at {left}, {top} exceeds the "
            f"image of {size[0]}x{size[1]}"
        )
    mask = blank_mask(size, where)
    mask[top : top + height, left : left + width] = window
    return Shape.from_mask(label, mask)
