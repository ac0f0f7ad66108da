"""CVAT for images 1.1: one XML file with the shapes of all images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from datamodules.annotation_formats.coco_files import WHOLE
from datamodules.annotation_formats.coco_records import (
    Parts,
    Photo,
    Shape,
    check_label,
    report_skipped,
    to_parts,
)
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import (
    Point,
    blank_mask,
    bounds,
    corners,
    ellipse,
    rotate,
)
from datamodules.annotation_formats.xml_files import Element, numbers, read_xml
from datamodules.files.text_files import finite_number
from datamodules.files.values import file_errors, refuse

FILE = "annotations.xml"
REMEDY = "export again with 'Save images', or copy them there"


def find(root: Path) -> Path | None:
    """Return CVAT's file; None if it is missing."""
    file = root / FILE
    return file if file.is_file() else None


def convert(root: Path, file: Path) -> Parts:
    """Return the subsets of the file, or all of it as one split."""
    element = read_xml(file)
    names = [
        (label.findtext("name") or "").strip() for label in element.findall("meta/*/labels/label")
    ]
    entries = element.findall("image")
    faults = {
        "must have the root <annotations>": element.tag != "annotations",
        "is in the format CVAT for video 1.1, which is unsupported; export CVAT for images 1.1 or "
        "COCO 1.0": element.find("track") is not None,
        "must list labels in <meta> and images; export it again": not names or not entries,
    }
    refuse(file, faults)
    images, skipped = Images(root), Counter[str]()
    splits: dict[str, list[Photo]] = {}
    missing: list[str] = []
    for entry in entries:
        name, subset = entry.get("name", ""), entry.get("subset") or WHOLE
        file_name = images.find(name, [f"images/{subset}", "images", ""])
        if file_name is None:
            missing.append(name)
            continue
        with file_errors(f"{file}: image {name}"):
            photo = Photo(file_name, _shapes(entry, names, skipped), _size(entry))
        splits.setdefault(subset, []).append(photo)
    images.require_found(missing, file, REMEDY)
    report_skipped(file, skipped)
    return to_parts(splits, file, images, names)


def _size(entry: Element) -> Size:
    width, height = numbers(entry, "width", "height")
    return int(width), int(height)


def _shapes(entry: Element, names: list[str], skipped: Counter[str]) -> list[Shape]:
    """Return the objects of an image; polygons of equal group and label form one object."""
    groups: dict[tuple[str, str], list[list[Point]]] = {}
    shapes = []
    for element in entry:
        if element.tag == "tag":
            continue
        if element.tag not in ("box", "polygon", "mask", "ellipse"):
            skipped[element.tag] += 1
            continue
        label = element.attrib["label"]
        check_label(label, names)
        group = element.get("group_id") or "0"
        if element.tag == "polygon" and group != "0":
            groups.setdefault((label, group), []).append(_points(element))
            continue
        shapes.append(_shape(element, label, entry))
    return shapes + [Shape.from_polygons(label, parts) for (label, _), parts in groups.items()]


def _shape(element: Element, label: str, entry: Element) -> Shape:
    angle = finite_number(element.get("rotation", "0"))
    if element.tag == "box":
        x_min, top, right, bottom = numbers(element, "xtl", "ytl", "xbr", "ybr")
        box = (x_min, top, right - x_min, bottom - top)
        if angle:
            centre = ((x_min + right) / 2, (top + bottom) / 2)
            box = bounds(rotate(corners(*box), centre, angle))
        return Shape.from_box(label, box)
    if element.tag == "ellipse":
        x, y, rx, ry = numbers(element, "cx", "cy", "rx", "ry")
        return Shape.from_polygons(label, [ellipse((x, y), (rx, ry), angle)])
    if element.tag == "polygon":
        return Shape.from_polygons(label, [_points(element)])
    return _mask(element, label, _size(entry))


def _points(element: Element) -> list[Point]:
    """Return the corners of x,y;x,y;..."""
    pairs = (pair.split(",") for pair in element.attrib["points"].split(";"))
    return [(finite_number(x), finite_number(y)) for x, y in pairs]


def _mask(element: Element, label: str, size: Size) -> Shape:
    """Return the shape of run lengths, which fill a window row by row."""
    x_min, top, width, height = map(int, numbers(element, "left", "top", "width", "height"))
    counts = [finite_number(count) for count in element.attrib["rle"].split(",")]
    inside = 0 <= x_min and 0 <= top and x_min + width <= size[0] and top + height <= size[1]
    if min(counts) < 0 or sum(counts) != width * height or not inside:
        raise ValueError(
            f"a mask's run lengths must fill a window of {width}x{height} pixels inside the image "
            f"of {size[0]}x{size[1]}, got {sum(counts):.0f} pixels at {x_min}, {top}"
        )
    values = np.arange(len(counts)) % 2 == 1
    window = np.repeat(values, np.array(counts, np.int64)).reshape(height, width)
    mask = blank_mask(size)
    mask[top : top + height, x_min : x_min + width] = window
    return Shape.from_mask(label, mask)
