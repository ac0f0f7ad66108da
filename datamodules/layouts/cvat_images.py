"""CVAT for images 1.1: one XML file with the shapes of all images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from datamodules.files.integers import format_value
from datamodules.layouts import WHOLE
from datamodules.layouts.coco_records import (
    Parts,
    Photo,
    Shape,
    check_label,
    report_skipped,
    to_parts,
)
from datamodules.layouts.image_lookup import Images, Size
from datamodules.layouts.outlines import Point, blank_mask, bounds, corners, ellipse, rotate
from datamodules.layouts.xml_files import Element, get_attribute, parse_number, read_xml

FILE = "annotations.xml"
REMEDY = "export again with 'Save images', or copy them there"


def find(root: Path) -> Path | None:
    """Return CVAT's file; None if it is missing."""
    file = root / FILE
    return file if file.is_file() else None


def convert(root: Path, file: Path) -> Parts:
    """Return the subsets of the file, or all of it as one split."""
    element = read_xml(file)
    if element.tag != "annotations":
        raise ValueError(f"{file} must have the root <annotations>, got <{element.tag}>")
    if element.find("track") is not None:
        raise ValueError(
            f"{file} is in the format CVAT for video 1.1, which is unsupported; export CVAT for "
            "images 1.1 or COCO 1.0"
        )
    names = [
        (label.findtext("name") or "").strip() for label in element.findall("meta/*/labels/label")
    ]
    if not names:
        raise ValueError(f"{file} must list labels in <meta>; export it again")
    images, skipped = Images(root), Counter[str]()
    entries = element.findall("image")
    if not entries:
        raise ValueError(f"{file} must list images; export it again")
    splits: dict[str, list[Photo]] = {}
    missing: list[str] = []
    for entry in entries:
        name, subset = get_attribute(entry, "name", str(file)), entry.get("subset") or WHOLE
        found = images.find(name, [f"images/{subset}", "images", ""])
        if found is None:
            missing.append(name)
            continue
        where = f"{file}: image {name}"
        photo = Photo(found, _shapes(entry, names, where, skipped), _size(entry, where))
        splits.setdefault(subset, []).append(photo)
    images.require_found(missing, file, REMEDY)
    report_skipped(file, skipped)
    return to_parts(splits, file, images, names)


def _size(entry: Element, where: str) -> Size:
    width, height = (
        parse_number(get_attribute(entry, side, where), f"{where}: {side}")
        for side in ("width", "height")
    )
    return int(width), int(height)


def _shapes(entry: Element, names: list[str], where: str, skipped: Counter[str]) -> list[Shape]:
    """Return the objects of an image; polygons of equal group and label form one object."""
    groups: dict[tuple[str, str], list[list[Point]]] = {}
    shapes = []
    for one in entry:
        if one.tag == "tag":
            continue
        if one.tag not in ("box", "polygon", "mask", "ellipse"):
            skipped[one.tag] += 1
            continue
        label = get_attribute(one, "label", where)
        check_label(label, names, where)
        group = one.get("group_id") or "0"
        if one.tag == "polygon" and group != "0":
            groups.setdefault((label, group), []).append(_points(one, where))
            continue
        shapes.append(_shape(one, label, entry, where))
    return shapes + [Shape.from_polygons(label, parts) for (label, _), parts in groups.items()]


def _shape(one: Element, label: str, entry: Element, where: str) -> Shape:
    angle = parse_number(one.get("rotation", "0"), f"{where}: rotation")
    if one.tag == "box":
        left, top, right, bottom = _numbers(one, ("xtl", "ytl", "xbr", "ybr"), where)
        box = (left, top, right - left, bottom - top)
        if angle:
            centre = ((left + right) / 2, (top + bottom) / 2)
            box = bounds(rotate(corners(*box), centre, angle))
        return Shape.from_box(label, box)
    if one.tag == "ellipse":
        x, y, rx, ry = _numbers(one, ("cx", "cy", "rx", "ry"), where)
        return Shape.from_polygons(label, [ellipse((x, y), (rx, ry), angle)])
    if one.tag == "polygon":
        return Shape.from_polygons(label, [_points(one, where)])
    return _mask(one, label, _size(entry, where), where)


def _numbers(one: Element, names: tuple[str, ...], where: str) -> list[float]:
    return [parse_number(get_attribute(one, name, where), f"{where}: {name}") for name in names]


def _points(one: Element, where: str) -> list[Point]:
    points: list[Point] = []
    for pair in get_attribute(one, "points", where).split(";"):
        x, comma, y = pair.partition(",")
        if not comma:
            raise ValueError(f"{where}: points must be x,y;x,y;..., got {format_value(pair)}")
        points.append((parse_number(x, f"{where}: x"), parse_number(y, f"{where}: y")))
    return points


def _mask(one: Element, label: str, size: Size, where: str) -> Shape:
    """Return the shape of run lengths, which fill a window row by row."""
    left, top, width, height = map(int, _numbers(one, ("left", "top", "width", "height"), where))
    counts = [
        parse_number(count, f"{where}: rle")
        for count in get_attribute(one, "rle", where).split(",")
    ]
    inside = 0 <= left and 0 <= top and left + width <= size[0] and top + height <= size[1]
    if min(counts) < 0 or sum(counts) != width * height or not inside:
        raise ValueError(
            f"{where}: a mask's run lengths must fill a window of {width}x{height} pixels inside "
            f"the image of {size[0]}x{size[1]}, got {sum(counts):.0f} pixels at {left}, {top}"
        )
    values = np.arange(len(counts)) % 2 == 1
    window = np.repeat(values, np.array(counts, np.int64)).reshape(height, width)
    mask = blank_mask(size, where)
    mask[top : top + height, left : left + width] = window
    return Shape.from_mask(label, mask)
