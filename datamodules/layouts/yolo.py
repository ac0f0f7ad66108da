"""YOLO's text files: one line per object, with coordinates as shares of the image's sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from datamodules.files.console import log
from datamodules.files.folders import first_few, list_folders, require_names
from datamodules.files.integers import format_value
from datamodules.files.text_files import nfc, read_lines, read_text
from datamodules.layouts import WHOLE
from datamodules.layouts.coco_files import REMEDY
from datamodules.layouts.coco_records import Part, Parts, Photo, Shape, to_part
from datamodules.layouts.image_lookup import Images, Size
from datamodules.layouts.outlines import Point
from datamodules.layouts.xml_files import parse_number

SPLITS = ("train", "val", "valid", "validation", "test")  # keys of data.yaml and obj.data
OUTSIDE = 0.01  # share that a coordinate may lie outside the image; Ultralytics' tolerance
MOST_BYTES = 2**22  # of a yaml file with splits and names
DARKNET = "_darknet.labels"
NO_LABELS = frozenset({"classes", "labels", "train", "val", "valid", "test", "README"})


@dataclass(frozen=True)
class Description:
    """Description of a YOLO dataset.

    Attributes:
        source: The file, for messages.
        names: Class names in label order.
        splits: Folders, lists or images per split.
    """

    source: Path
    names: tuple[str, ...]
    splits: Mapping[str, Sequence[str]]


def find_yaml(root: Path) -> Path | None:
    """Return the yaml file that describes a dataset, such as data.yaml."""
    files = sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    files.sort(key=lambda file: file.stem not in ("data", "dataset"))
    for file in files:
        if file.stat().st_size <= MOST_BYTES and "names" in (content := _yaml(file)):
            if any(split in content for split in SPLITS):
                return file
    return None


def find_roboflow(root: Path) -> Path | None:
    """Return the yaml file of an export with Roboflow's signature."""
    file = find_yaml(root)
    signed = file is not None and (
        (root / "README.roboflow.txt").is_file() or "roboflow" in _yaml(file)
    )
    return file if signed else None


def _yaml(file: Path) -> dict[str, Any]:
    """Return a yaml file with all values as text, since names may be no, on or 1.10."""
    try:
        text = read_text(file)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError(f"{file} has YAML aliases (*name); write the values out")
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file} is not valid YAML{where}; correct it") from None
    return content if isinstance(content, dict) else {}


def describe_yaml(file: Path) -> Description:
    """Return the description in data.yaml."""
    content = _yaml(file)
    if "kpt_shape" in content:
        raise ValueError(
            f"{file} describes key points (kpt_shape), which are unsupported; export boxes or "
            "polygons"
        )
    names = content["names"]
    if isinstance(names, dict):
        places = sorted(names, key=lambda key: int(key) if key.isdecimal() else -1)
        if places != [str(number) for number in range(len(names))]:
            raise ValueError(
                f"{file}: names must be numbered 0 to {len(names) - 1}, got {first_few(places)}"
            )
        names = [names[place] for place in places]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{file}: names must be a list of class names, got {format_value(names)}")
    number_of = content.get("nc", str(len(names)))
    if number_of != str(len(names)):
        raise ValueError(f"{file}: nc is {number_of}, but names has {len(names)} entries")
    base = content.get("path") or ""
    splits = {}
    for split in SPLITS:
        entries = content.get(split) or []
        entries = [entries] if isinstance(entries, str) else entries
        if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
            raise ValueError(
                f"{file}: {split} must be a folder, a text file or a list of them, got "
                f"{format_value(entries)}"
            )
        if entries:
            splits[split] = [f"{base}/{entry}" if base else entry for entry in entries]
    return Description(file, _checked(names, file), splits)


def _placed(root: Path, entry: str) -> str | None:
    """Return an existing folder or list, relative to the root; None if it is missing.

    The path may come from another machine, and Roboflow's is off by one folder. So the longest
    ending of the path that exists here counts.
    """
    parts = [part for part in entry.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    endings = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((ending for ending in endings if (root / ending).exists()), None)


def describe_darknet(file: Path) -> Description:
    """Return the description in CVAT's obj.data."""
    root = file.parent
    rows = [line.partition("=") for line in read_lines(file) if "=" in line]
    content = {key.strip(): value.strip() for key, _, value in rows}
    if "names" not in content:
        raise ValueError(f"{file} lacks a line 'names = data/obj.names'")
    listed = root / (_placed(root, content["names"]) or content["names"])
    names = [line for line in read_lines(listed) if line]
    splits = {split: [content[split]] for split in SPLITS if split in content}
    return Description(file, _checked(names, listed), splits)


def describe_classes(file: Path) -> Description:
    """Return the description in Label Studio's classes.txt, beside ``images`` and ``labels``."""
    names = [line for line in read_lines(file) if line]
    return Description(file, _checked(names, file), {WHOLE: ["images"]})


def find_labelled(root: Path) -> dict[str, Path]:
    """Return Roboflow's list of Darknet classes per split."""
    found = {name: root / name / DARKNET for name in list_folders(root)}
    return {name: file for name, file in found.items() if file.is_file()}


def describe_labelled(root: Path) -> Description:
    """Return the description of Roboflow's Darknet export: one list of classes per split."""
    found = find_labelled(root)
    names = {tuple(line for line in read_lines(file) if line) for file in found.values()}
    if len(names) > 1:
        raise ValueError(f"{root}: the files {DARKNET} of its splits differ; export them again")
    first = next(iter(found.values()))
    return Description(first, _checked(names.pop(), first), {name: [name] for name in found})


def _checked(names: Sequence[str], file: Path) -> tuple[str, ...]:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{file} must hold different class names, got {first_few(names, 10)}")
    return tuple(names)


def convert(description: Description) -> Parts:
    """Return the splits of a YOLO dataset."""
    root = description.source.parent
    if description.source.name == DARKNET:
        root = root.parent
    images = Images(root)
    files: dict[str, list[str]] = {}
    empty = []
    for split, entries in description.splits.items():
        places = [place for entry in entries if (place := _placed(root, entry))]
        files[split] = sorted({file for place in places for file in _listed(place, images)})
        if not files[split]:
            empty.append(f"{split}: {first_few(entries)}")
            del files[split]
    if not files:
        raise FileNotFoundError(
            f"{description.source} names folders without images in {root} ({first_few(empty)}); "
            f"{REMEDY}"
        )
    if empty:
        log(f"{description.source} names folders without images, skipped: {first_few(empty)}")
    return {split: partial(_part, description, names, images) for split, names in files.items()}


def _part(description: Description, files: Sequence[str], images: Images) -> Part:
    labels = {file: _label_file(images.folder, file) for file in files}
    _report(description.source, labels, images.folder)
    photos = []
    for file, size in zip(files, images.sizes(files), strict=True):
        label = labels[file]
        shapes = [] if label is None else read_labels(label, description.names, size)
        photos.append(Photo(file, shapes, size))
    return to_part(photos, description.source, images, description.names)


def _listed(entry: str, images: Images) -> list[str]:
    """Return the images of a folder, or of a text file with one path per line."""
    place = images.folder / entry
    if place.is_dir():
        return images.list_folder(entry)
    lines = [line for line in read_lines(place) if line]
    return list(images.find_all(lines, place, REMEDY).values())


def _label_file(root: Path, image: str) -> Path | None:
    """Return the text file of an image: in labels for images, or beside it."""
    beside = (root / image).with_suffix(".txt")
    parts = image.split("/")
    if "images" in parts[:-1]:
        place = len(parts) - 2 - parts[-2::-1].index("images")
        parallel = root.joinpath(*parts[:place], "labels", *parts[place + 1 :]).with_suffix(".txt")
        if parallel.is_file():
            return parallel
    return beside if beside.is_file() else None


def _report(source: Path, labels: Mapping[str, Path | None], root: Path) -> None:
    """Log images without a text file, and text files without an image.

    Raises:
        FileNotFoundError: All text files are missing.
    """
    bare = [image for image, label in labels.items() if label is None]
    if len(bare) == len(labels):
        require_names(
            {str(root / image) for image in bare},
            f"images of {source} lack a text file of labels",
            "put <name>.txt into labels/ beside images/, or beside the image",
        )
    if bare:
        log(
            f"{source}: {len(bare)} of {len(labels)} images lack a text file of labels and count "
            f"as images without objects: {first_few(sorted(bare), 3)}"
        )
    known = {nfc(str(label)) for label in labels.values() if label is not None}
    folders = {label.parent for label in labels.values() if label is not None}
    strays = [
        file
        for folder in sorted(folders)
        for file in sorted(folder.glob("*.txt"))
        if nfc(str(file)) not in known and file.stem not in NO_LABELS
    ]
    if strays:
        log(f"{source}: {len(strays)} text files lack an image: {first_few(strays, 3)}")


def read_labels(file: Path, names: Sequence[str], size: Size) -> list[Shape]:
    """Return the objects of an image.

    Args:
        file: Text file with lines "class x y width height" (x, y: centre), or "class x1 y1 x2 y2
            x3 y3 ..." for polygons.
        names: Class names.
        size: Width and height of the image.
    """
    shapes = []
    for place, line in enumerate(read_lines(file), 1):
        where, fields = f"{file}, line {place}", line.split()
        if not fields:
            continue
        if len(fields) != 5 and (len(fields) < 7 or len(fields) % 2 == 0):
            raise ValueError(
                f"{where} must hold a class and four numbers of a box, or a class and the corners "
                f"of a polygon, got {len(fields)} numbers"
            )
        label = _class_name(fields[0], names, where)
        shares = [_share(field, where) for field in fields[1:]]
        shapes.append(
            _box(label, shares, size) if len(shares) == 4 else _polygon(label, shares, size)
        )
    return shapes


def _class_name(text: str, names: Sequence[str], where: str) -> str:

    value = parse_number(text, f"{where}: class")
    if not value.is_integer() or not 0 <= value < len(names):
        raise ValueError(
            f"{where}: class must be an integer from 0 to {len(names) - 1}, got {text}"
        )
    return names[int(value)]


def _share(text: str, where: str) -> float:
    value = parse_number(text, f"{where}: a coordinate")
    if not -OUTSIDE <= value <= 1 + OUTSIDE:
        raise ValueError(
            f"{where}: coordinates must be shares of the image's sides from 0 to 1, got {text}"
        )
    return value


def _box(label: str, shares: Sequence[float], size: Size) -> Shape:
    x, y, width, height = shares
    box = ((x - width / 2) * size[0], (y - height / 2) * size[1], width * size[0], height * size[1])
    return Shape.from_box(label, box)


def _polygon(label: str, shares: Sequence[float], size: Size) -> Shape:
    points: list[Point] = [
        (x * size[0], y * size[1]) for x, y in zip(shares[::2], shares[1::2], strict=True)
    ]
    return Shape.from_polygons(label, [points])
