"""Label Studio's JSON and JSON-MIN: a list of tasks, each with an image and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from datamodules.files.console import log
from datamodules.files.folders import IMAGE_SUFFIXES, file_suffix, first_few
from datamodules.files.text_files import read_json
from datamodules.layouts import WHOLE
from datamodules.layouts.coco_files import read_start
from datamodules.layouts.coco_records import Parts, Photo, Shape, report_skipped, to_parts
from datamodules.layouts.image_lookup import Images, Size
from datamodules.layouts.json_files import get_number, get_points, get_value
from datamodules.layouts.outlines import Point, bounds, corners, ellipse, rotate

KINDS = {
    "rectanglelabels": "rectangle",
    "polygonlabels": "polygon",
    "ellipselabels": "ellipse",
    "brushlabels": "brush",
    "labels": "",
}
REMEDY = "copy them there, under the names in the export or their original names"


def find(root: Path) -> list[Path]:
    """Return the exports: project-<number>-at-<date>-<id>.json or other lists of tasks."""
    return [file for file in sorted(root.glob("*.json")) if _is_tasks(file)]


def _is_tasks(file: Path) -> bool:
    text = read_start(file)
    keys = ("annotations", "completions", "annotation_id")
    return text.startswith("[") and any(f'"{key}"' in text for key in keys)


def convert(root: Path, files: Sequence[Path]) -> Parts:
    """Return the only split of an export."""
    if len(files) > 1:
        raise ValueError(
            f"{root} has several exports of Label Studio: "
            f"{first_few(file.name for file in files)}; keep one of them"
        )
    file, images = files[0], Images(root)
    tasks = read_json(file)
    if not isinstance(tasks, list) or not tasks:
        raise ValueError(f"{file} must be a list of tasks, got {type(tasks).__name__}")
    photos, missing, skipped, several = [], [], Counter[str](), 0
    for place, task in enumerate(tasks):
        where = f"{file}: task {task.get('id', place) if isinstance(task, dict) else place}"
        results, others = _results(task, where)
        several += others
        name = _image_path(task, where)
        found = images.find(name, ("", "images"))
        if found is None:
            missing.append(name)
            continue
        photos.append(Photo(found, _shapes(results, where, skipped), _size(results, where)))
    images.require_found(missing, file, REMEDY)
    if several:
        log(f"{file}: {several} tasks have several annotations; the latest of each is read")
    report_skipped(file, skipped)
    return to_parts({WHOLE: photos}, file, images)


def _results(task: Any, where: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the results of a task's latest annotation, and True if there are others."""
    if not isinstance(task, dict):
        raise ValueError(f"{where} must be an object, got {type(task).__name__}")
    if "annotations" not in task and "completions" not in task:
        return list(_minimal(task)), False
    key = "annotations" if "annotations" in task else "completions"
    kept = [
        one
        for one in get_value(task, key, list, where)
        if isinstance(one, dict) and not (one.get("was_cancelled") or one.get("skipped"))
    ]
    if not kept:
        return [], False
    latest = max(kept, key=lambda one: str(one.get("created_at", "")))
    results = get_value(latest, "result", list, where)
    return [one for one in results if isinstance(one, dict) and "value" in one], len(kept) > 1


def _minimal(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a task of JSON-MIN, in the form of JSON."""
    for value in task.values():
        for one in value if isinstance(value, list) else ():
            if isinstance(one, dict) and "original_width" in one:
                yield {**one, "value": one}


def _image_path(task: dict[str, Any], where: str) -> str:
    """Return the path of a task's image."""
    data = task.get("data", task)
    values = data.values() if isinstance(data, dict) else ()
    paths = [_path(value) for value in values if isinstance(value, str)]
    named = [path for path in paths if file_suffix(path) in IMAGE_SUFFIXES]
    if not named:
        raise ValueError(f"{where}: data must name an image file, got {str(data)[:80]}")
    return named[0]


def _path(address: str) -> str:
    """Return the path in a URL or plain path.

    Examples: /data/upload/1/a.jpg, s3://bucket/a.jpg, /data/local-files/?d=folder/a.jpg.
    """
    parts = urlsplit(address)
    local = parse_qs(parts.query).get("d")
    return local[0] if local else unquote(parts.path)


def _size(results: Sequence[dict[str, Any]], where: str) -> Size | None:
    sizes = {
        (
            int(get_number(one, "original_width", where)),
            int(get_number(one, "original_height", where)),
        )
        for one in results
        if "original_width" in one
    }
    return next(iter(sizes)) if len(sizes) == 1 else None


def _shapes(results: Sequence[dict[str, Any]], where: str, skipped: Counter[str]) -> list[Shape]:
    shapes = []
    for one in results:
        value = one["value"]
        key = next((key for key in KINDS if isinstance(value, dict) and key in value), None)
        if key is None:
            skipped[str(one.get("type", "results"))] += 1
            continue
        labels = get_value(value, key, list, where)
        if not labels:
            skipped["without a label"] += 1
            continue
        if KINDS[key] == "brush" or "rle" in value:
            raise ValueError(
                f"{where} has brush masks, which Label Studio's JSON stores in its own coding; "
                "export 'COCO with images', or draw polygons"
            )
        shapes.append(_shape(str(labels[0]), value, one, where))
    return shapes


def _shape(label: str, value: dict[str, Any], one: dict[str, Any], where: str) -> Shape:
    """Return the shape of a result; coordinates are percentages of the image's sides."""
    across = get_number(one, "original_width", where) / 100
    down = get_number(one, "original_height", where) / 100

    def pixels(horizontal: str, vertical: str) -> Point:
        return (
            get_number(value, horizontal, where) * across,
            get_number(value, vertical, where) * down,
        )

    angle = get_number(value, "rotation", where) if value.get("rotation") else 0.0
    if "points" in value:
        polygon = [(x * across, y * down) for x, y in get_points(value, where)]
        return Shape.from_polygons(label, [polygon])
    x, y = pixels("x", "y")
    if "radiusX" in value:
        return Shape.from_polygons(label, [ellipse((x, y), pixels("radiusX", "radiusY"), angle)])
    width, height = pixels("width", "height")
    if not angle:
        return Shape.from_box(label, (x, y, width, height))
    # A box is rotated about its first corner.
    return Shape.from_box(label, bounds(rotate(corners(x, y, width, height), (x, y), angle)))
