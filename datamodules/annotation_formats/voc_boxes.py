"""Boxes in Pascal VOC's XML files, one per image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datamodules.annotation_formats.coco_files import REMEDY, WHOLE
from datamodules.annotation_formats.coco_records import Parts, Photo, Shape, to_parts
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import Point
from datamodules.annotation_formats.xml_files import Element, child, child_text, read_xml
from datamodules.files.folders import list_folders
from datamodules.files.text_files import finite_number, nfc, read_lines
from datamodules.files.values import file_errors

LISTS = "ImageSets/Main"
# Roboflow's pixels start at 1 and xmax is the last pixel, as in VOC's own files; its library
# supervision reads them so. The other tools write x and x + width.
ONE_BASED = "roboflow"


def find_roboflow(root: Path) -> dict[str, list[Path]]:
    """Return the files per split, which lie beside the images."""
    root_files = _xml_files(root)
    if root_files and _is_voc(root_files[0]):
        return {WHOLE: root_files}
    folders = {name: _xml_files(root / name) for name in list_folders(root)}
    return {
        n: files
        for n, files in folders.items()
        if n != "Annotations" and files and _is_voc(files[0])
    }


def find_label_studio(root: Path) -> dict[str, list[Path]]:
    """Return the files of Label Studio's folder ``Annotations``, with ``images`` beside it."""
    return find_devkit(root) if (root / "images").is_dir() else {}


def find_devkit(root: Path) -> dict[str, list[Path]]:
    """Return the files of a folder ``Annotations``, by the lists in ``ImageSets/Main``.

    A listed image may lack its file: CVAT writes files only for images with objects.
    """
    folder = root / "Annotations"
    files = sorted(folder.rglob("*.xml")) if folder.is_dir() else []
    if not files or not _is_voc(files[0]):
        return {}
    by_stem = {nfc(file.relative_to(folder).with_suffix("").as_posix()): file for file in files}
    splits = {
        file.stem: [
            by_stem.get(stem, folder / f"{stem}.xml")
            for stem in (line.strip('"') for line in read_lines(file) if line)  # CVAT quotes spaces
        ]
        for file in _lists(root)
    }
    return splits or {WHOLE: files}


def _lists(root: Path) -> list[Path]:
    """Return the lists of splits without those of single classes, <class>_<split>."""
    files = sorted((root / LISTS).glob("*.txt"))
    stems = {file.stem for file in files}
    splits = [file for file in files if file.stem.rpartition("_")[2] not in stems - {file.stem}]
    return [file for file in splits if file.stem != "trainval" or len(splits) == 1]


def _xml_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.xml") if not file.name.startswith("."))


def _is_voc(file: Path) -> bool:
    return read_xml(file).tag == "annotation"


def convert(root: Path, splits: dict[str, list[Path]]) -> Parts:
    """Return the splits of an export."""
    images = Images(root)
    photos = {name: _photos(files, images) for name, files in splits.items()}
    return to_parts(photos, root, images)


def _photos(files: Sequence[Path], images: Images) -> list[Photo]:
    photos, missing = [], []
    for file in files:
        element = read_xml(file) if file.is_file() else Element("annotation")
        folder = file.parent.relative_to(images.folder).as_posix()
        near = [folder if folder != "." else "", "JPEGImages", "images"]
        file_name = (element.findtext("filename") or "").strip()
        name = (
            images.find(file_name.replace("\\", "/").rpartition("/")[2], near)
            if file_name
            else None
        )
        name = name or images.find_stem(_stem(file, images.folder), near)
        if name is None:
            missing.append(file_name or file.stem)
            continue
        photos.append(Photo(name, [], _size(element), file))
        for number, part in enumerate(element.findall("object"), 1):
            with file_errors(f"{file}: object {number}"):
                photos[-1].shapes.append(_shape(part, element))
    images.require_found(missing, images.folder, REMEDY)
    return photos


def _stem(file: Path, root: Path) -> str:
    """Return the path of a file below Annotations, or else its name, without the ending."""
    parts = file.relative_to(root).with_suffix("").parts
    return "/".join(parts[1:]) if parts[0] == "Annotations" else parts[-1]


def _size(element: Element) -> Size | None:
    """Return the annotated width and height; None if the tool wrote none, or zeros."""
    sides = [(element.findtext(f"size/{side}") or "").strip() for side in ("width", "height")]
    if not all(side.isdecimal() and int(side) for side in sides):
        return None
    return int(sides[0]), int(sides[1])


def _shape(part: Element, element: Element) -> Shape:
    label = child_text(part, "name")
    first = ONE_BASED in (element.findtext("source/database") or "")
    polygon = part.find("polygon")
    if polygon is not None and len(polygon):
        points = [(x - first, y - first) for x, y in _points(polygon)]
        if len(points) >= 3:
            return Shape.from_polygons(label, [points])
    box = child(part, "bndbox")
    x_min, top, right, bottom = (
        finite_number(child_text(box, side)) for side in ("xmin", "ymin", "xmax", "ymax")
    )
    x_min, top = x_min - first, top - first
    return Shape.from_box(label, (x_min, top, right - x_min, bottom - top))


def _points(polygon: Element) -> list[Point]:
    """Return the corners of <x1>, <y1>, <x2>, ..., or of <pt><x/><y/></pt>."""
    points: list[Point] = []
    while (x := polygon.findtext(f"x{len(points) + 1}")) is not None:
        points.append((finite_number(x), finite_number(child_text(polygon, f"y{len(points) + 1}"))))
    return points
