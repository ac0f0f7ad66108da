"""COCO files in the places of Roboflow, CVAT, Label Studio and FiftyOne."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.annotation_formats.coco_checks import check_content
from datamodules.annotation_formats.coco_records import Part, Parts
from datamodules.annotation_formats.image_lookup import Images
from datamodules.files.folders import list_folders
from datamodules.files.text_files import read_json, text_start

WHOLE = "the export"  # name of the only split of an undivided export
ROBOFLOW = "_annotations.coco.json"
CVAT = "instances_"
LABEL_STUDIO = "result.json"
FIFTYONE = "labels.json"
REMEDY = "export them too, or copy them there"


def read_start(file: Path, size: int = 4096) -> str:
    """Return the start of a JSON file without leading blanks."""
    with file.open("rb") as opened_file:
        return text_start(opened_file.read(size))


def files_per_folder(root: Path, name: str) -> dict[str, Path]:
    """Return files of one name in the root or its folders, by folder name."""
    if (root / name).is_file():
        return {WHOLE: root / name}
    return {n: root / n / name for n in list_folders(root) if (root / n / name).is_file()}


def find_roboflow(root: Path) -> dict[str, Path]:
    """Return Roboflow's json per split."""
    return files_per_folder(root, ROBOFLOW)


def find_fiftyone(root: Path) -> dict[str, Path]:
    """Return FiftyOne's json per export, with ``data`` beside it."""
    files = files_per_folder(root, FIFTYONE)
    return {name: file for name, file in files.items() if (file.parent / "data").is_dir()}


def find_cvat(root: Path) -> dict[str, Path]:
    """Return CVAT's json per subset."""
    files = sorted(root.glob(f"annotations/{CVAT}*.json"))
    return {file.stem.removeprefix(CVAT): file for file in files}


def find_label_studio(root: Path) -> dict[str, Path]:
    """Return Label Studio's json; its JSON-MIN has the same name, but is a list."""
    file = root / LABEL_STUDIO
    return {WHOLE: file} if file.is_file() and read_start(file).startswith("{") else {}


def convert(root: Path, find: Callable[[Path], Mapping[str, Path]]) -> Parts:
    """Return the splits of an export as functions that read them."""
    images = Images(root)
    return {name: partial(_read, file, name, images) for name, file in find(root).items()}


def _read(file: Path, split: str, images: Images) -> Part:
    content = read_json(file)
    beside = file.parent.relative_to(images.folder).as_posix()
    folder = "" if beside == "." else beside
    near = [folder, f"{folder}/data".lstrip("/"), f"images/{split}", "images", split, ""]
    entries = content.get("images") if isinstance(content, dict) else None
    _fill_sizes(entries if isinstance(entries, list) else [], images, near)
    content = check_content(file, content)
    names = {image["file_name"] for image in content["images"]}
    files = images.find_all(names, file, REMEDY, near)
    for image in content["images"]:
        image["file_name"] = files[image["file_name"]]
    return Part(file, images.folder, content)


def _fill_sizes(entries: Sequence[Any], images: Images, near: Sequence[str]) -> None:
    """Set the sizes that Label Studio leaves null for images without annotations."""
    for entry in entries:
        has_name = isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
        if has_name and entry.get("width") is None and entry.get("height") is None:
            files = images.find(entry["file_name"], near)
            if files is not None:
                ((entry["width"], entry["height"]),) = images.sizes([files])
