"""Exports with boxes and outlines, by tool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from datamodules.annotation_formats import (
    coco_files,
    cvat_images,
    label_studio,
    labelme,
    voc_boxes,
    yolo,
)
from datamodules.annotation_formats.coco_records import Parts
from datamodules.annotation_formats.foreign_formats import detect_foreign_format
from datamodules.files.folders import first_few
from datamodules.files.values import refuse

AUTO: Final = "auto"
OWN: Final = "coco"


@dataclass(frozen=True)
class Format:
    """Format that a tool exports.

    Attributes:
        tool: Value of ``data.layout``.
        title: Name in messages.
        find: Returns the argument of ``convert``; false if the folder has another format.
        convert: Returns the splits.
    """

    tool: str
    title: str
    find: Callable[[Path], Any]
    convert: Callable[[Path, Any], Parts]


def _coco(tool: str, title: str, find: Callable[[Path], Any]) -> Format:
    return Format(tool, title, find, lambda root, _: coco_files.convert(root, find))


def _yolo(tool: str, title: str, find: Callable[[Path], Path | None] = yolo.find_yaml) -> Format:
    return Format(tool, title, find, lambda _, file: yolo.convert(yolo.describe_yaml(file)))


def _file(name: str) -> Callable[[Path], Path | None]:
    return lambda root: root / name if (root / name).is_file() else None


def _label_studio_yolo(root: Path) -> Path | None:
    file = root / "classes.txt"
    return file if file.is_file() and (root / "labels").is_dir() else None


# The first match counts, so a tool's own format comes before a common one.
FORMATS = (
    _coco("roboflow", "Roboflow's COCO export", coco_files.find_roboflow),
    Format("cvat", "CVAT for images 1.1", cvat_images.find, cvat_images.convert),
    Format("cvat", "CVAT's YOLO 1.1", _file("obj.data"),
           lambda _, file: yolo.convert(yolo.describe_darknet(file))),
    Format("label_studio", "Label Studio's YOLO export", _label_studio_yolo,
           lambda _, file: yolo.convert(yolo.describe_classes(file))),
    Format("roboflow", "Roboflow's YOLO Darknet export", yolo.find_labelled,
           lambda root, _: yolo.convert(yolo.describe_labelled(root))),
    _yolo("roboflow", "Roboflow's YOLO export", yolo.find_roboflow),
    _yolo("yolo", "YOLO's data.yaml"),
    _yolo("roboflow", "Roboflow's YOLO export"),
    _yolo("cvat", "CVAT's Ultralytics YOLO export"),
    _yolo("fiftyone", "FiftyOne's YOLO export"),
    _coco("label_studio", "Label Studio's COCO export", coco_files.find_label_studio),
    _coco("fiftyone", "FiftyOne's COCO export", coco_files.find_fiftyone),
    _coco("cvat", "CVAT's COCO 1.0", coco_files.find_cvat),
    Format("label_studio", "Label Studio's Pascal VOC export", voc_boxes.find_label_studio,
           voc_boxes.convert),
    Format("cvat", "CVAT's Pascal VOC 1.1", voc_boxes.find_devkit, voc_boxes.convert),
    Format("roboflow", "Roboflow's Pascal VOC export", voc_boxes.find_roboflow, voc_boxes.convert),
    Format("label_studio", "Label Studio's JSON", label_studio.find, label_studio.convert),
    Format("labelme", "LabelMe's JSON files", labelme.find, labelme.convert),
)  # fmt: skip
Layout = Literal["auto", "coco", "cvat", "fiftyone", "label_studio", "labelme", "roboflow", "yolo"]


@dataclass(frozen=True)
class Export:
    """A recognised export.

    Attributes:
        root: Folder of the export.
        format: Its format.
        parts: Its splits.
    """

    root: Path
    format: Format
    parts: Parts

    @property
    def title(self) -> str:
        """Folder and format, for messages."""
        return f"{self.root} ({self.format.title}, data.layout={self.format.tool})"


def open_export(root: Path, layout: str) -> Export | None:
    """Recognise an export and list its splits; None with ``auto`` for an unknown folder.

    Raises:
        ValueError: The folder has another tool's format, or an unsupported one.
    """
    for form in FORMATS:
        if layout in (AUTO, form.tool):
            match = form.find(root)
            if match:
                return Export(root, form, form.convert(root, match))
    foreign = detect_foreign_format(root)
    if foreign is None and layout == AUTO:
        return None
    titles = first_few((form.title for form in FORMATS if form.tool == layout), 10)
    faults = {
        f"holds {foreign}, which is unsupported; export COCO or YOLO from the tool": bool(foreign),
        f"is not an export of data.layout={layout}: expected {titles}": True,
    }
    refuse(root, faults)
    return None
