"""Label Studio's JSON and JSON-MIN: a list of tasks, each with an image and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import Field, FiniteFloat, Strict, TypeAdapter

from datamodules.annotation_formats.coco_files import WHOLE, read_start
from datamodules.annotation_formats.coco_records import (
    Parts,
    Photo,
    Shape,
    report_skipped,
    to_parts,
)
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import Point, bounds, corners, ellipse, rotate
from datamodules.files.console import log
from datamodules.files.folders import IMAGE_SUFFIXES, file_suffix
from datamodules.files.text_files import read_json
from datamodules.files.values import file_errors, refuse

KINDS = {
    "rectanglelabels": "rectangle",
    "polygonlabels": "polygon",
    "ellipselabels": "ellipse",
    "brushlabels": "brush",
    "labels": "",
}
Coordinate = Annotated[FiniteFloat, Strict()]
TASKS = TypeAdapter(Annotated[list[dict[str, Any]], Field(min_length=1)])
NUMBERS = TypeAdapter(dict[str, Coordinate])
POINTS = TypeAdapter(list[tuple[Coordinate, Coordinate]])
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
    several = [file.name for file in files] if len(files) > 1 else []
    refuse(root, {"has several exports of Label Studio; keep one of them": several})
    file, images = files[0], Images(root)
    with file_errors(file):
        tasks = TASKS.validate_python(read_json(file))
    photos, missing, skipped, repeated = [], [], Counter[str](), 0
    for place, task in enumerate(tasks):
        with file_errors(f"{file}: task {task.get('id', place)}"):
            results, more = _results(task)
            repeated += more
            name = _image_path(task)
            image = images.find(name, ("", "images"))
            if image is None:
                missing.append(name)
                continue
            photos.append(Photo(image, _shapes(results, skipped), _size(results)))
    images.require_found(missing, file, REMEDY)
    if repeated:
        log(f"{file}: {repeated} tasks have several annotations; the latest of each is read")
    report_skipped(file, skipped)
    return to_parts({WHOLE: photos}, file, images)


def _results(task: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the results of a task's latest annotation, and True if there are others."""
    if "annotations" not in task and "completions" not in task:
        return list(_minimal(task)), False
    annotations = [
        annotation
        for annotation in task["annotations" if "annotations" in task else "completions"]
        if not (annotation.get("was_cancelled") or annotation.get("skipped"))
    ]
    if not annotations:
        return [], False
    latest = max(annotations, key=lambda annotation: str(annotation.get("created_at", "")))
    return [result for result in latest["result"] if "value" in result], len(annotations) > 1


def _minimal(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a task of JSON-MIN, in the form of JSON."""
    for value in task.values():
        for entry in value if isinstance(value, list) else ():
            if isinstance(entry, dict) and "original_width" in entry:
                yield {**entry, "value": entry}


def _image_path(task: dict[str, Any]) -> str:
    """Return the path of a task's image."""
    data = task.get("data", task)
    values = data.values() if isinstance(data, dict) else ()
    paths = [_path(value) for value in values if isinstance(value, str)]
    images = [path for path in paths if file_suffix(path) in IMAGE_SUFFIXES]
    refuse("data", {f"must name an image file, got {str(data)[:80]}": not images})
    return images[0]


def _path(address: str) -> str:
    """Return the path in a URL or plain path.

    Examples: /data/upload/1/a.jpg, s3://bucket/a.jpg, /data/local-files/?d=folder/a.jpg.
    """
    parts = urlsplit(address)
    local = parse_qs(parts.query).get("d")
    return local[0] if local else unquote(parts.path)


def _sides(result: dict[str, Any]) -> tuple[float, float]:
    sides = {key: result[key] for key in ("original_width", "original_height")}
    width, height = NUMBERS.validate_python(sides).values()
    return width, height


def _size(results: Sequence[dict[str, Any]]) -> Size | None:
    sizes = {_sides(result) for result in results if "original_width" in result}
    if len(sizes) != 1:
        return None
    ((width, height),) = sizes
    return int(width), int(height)


def _shapes(results: Sequence[dict[str, Any]], skipped: Counter[str]) -> list[Shape]:
    shapes = []
    for result in results:
        value = result["value"]
        key = next((key for key in KINDS if isinstance(value, dict) and key in value), None)
        if key is None or not value[key]:
            skipped["without a label" if key else str(result.get("type", "results"))] += 1
            continue
        brush = KINDS[key] == "brush" or "rle" in value
        remedy = "export 'COCO with images', or draw polygons"
        refuse("its JSON", {f"has brush masks in Label Studio's own coding; {remedy}": brush})
        shapes.append(_shape(str(value[key][0]), value, result))
    return shapes


def _shape(label: str, value: dict[str, Any], result: dict[str, Any]) -> Shape:
    """Return the shape of a result; coordinates are percentages of the image's sides."""
    across, down = (side / 100 for side in _sides(result))

    def pixels(horizontal: str, vertical: str) -> Point:
        share = NUMBERS.validate_python({key: value[key] for key in (horizontal, vertical)})
        return share[horizontal] * across, share[vertical] * down

    angle = NUMBERS.validate_python({"rotation": value.get("rotation") or 0})["rotation"]
    if "points" in value:
        points = POINTS.validate_python(value["points"])
        return Shape.from_polygons(label, [[(x * across, y * down) for x, y in points]])
    x, y = pixels("x", "y")
    if "radiusX" in value:
        return Shape.from_polygons(label, [ellipse((x, y), pixels("radiusX", "radiusY"), angle)])
    width, height = pixels("width", "height")
    if not angle:
        return Shape.from_box(label, (x, y, width, height))
    # A box is rotated about its first corner.
    return Shape.from_box(label, bounds(rotate(corners(x, y, width, height), (x, y), angle)))
