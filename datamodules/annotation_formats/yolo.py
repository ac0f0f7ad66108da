"""YOLO's text files: one line per object, with coordinates as shares of the image's sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from datamodules.annotation_formats.coco_files import REMEDY, WHOLE
from datamodules.annotation_formats.coco_records import Part, Parts, Photo, Shape, to_part
from datamodules.annotation_formats.image_lookup import Images, Size
from datamodules.annotation_formats.outlines import Point
from datamodules.files.console import log
from datamodules.files.folders import first_few, list_folders, require_names
from datamodules.files.text_files import finite_number, nfc, read_lines, read_text
from datamodules.files.values import Text, file_errors, format_value, refuse

SPLITS = ("train", "val", "valid", "validation", "test")  # keys of data.yaml and obj.data
OUTSIDE = 0.01  # share that a coordinate may lie outside the image; Ultralytics' tolerance
MOST_BYTES = 2**22  # of a yaml file with splits and names
DARKNET = "_darknet.labels"
NO_LABELS = frozenset({"classes", "labels", "train", "val", "valid", "test", "README"})


class DataYaml(BaseModel):
    """Content of data.yaml; all values are text."""

    names: list[Text] | dict[str, Text]
    nc: str | None = None
    path: str | None = None


class Splits(BaseModel):
    """Folders, text files, or lists of them, by split."""

    splits: dict[str, str | list[str]]


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
    text, mark, content = read_text(file), "", None
    try:
        # Nested aliases may stand for endless lists.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            mark = ": it has aliases (*name)"
        else:
            content = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        mark = f" in line {place.line + 1}" if place else ": it is nested too deeply"
    refuse(file, {f"is not valid YAML{mark}; correct it": bool(mark)})
    return content if isinstance(content, dict) else {}


def describe_yaml(file: Path) -> Description:
    """Return the description in data.yaml."""
    content = _yaml(file)
    with file_errors(file):
        description = DataYaml.model_validate(content)
        entries = Splits(splits={key: content[key] for key in SPLITS if content.get(key)}).splits
    names, count = description.names, len(description.names)
    numbered = names.keys() == set(map(str, range(count))) if isinstance(names, dict) else True
    nc = description.nc or str(count)
    faults = {
        "describes key points (kpt_shape), which are unsupported; export boxes or polygons": (
            "kpt_shape" in content
        ),
        f"must number its names from 0 to {count - 1}, got": [] if numbered else [*names],
        f"has nc {nc}, but {count} names; correct one": nc != str(count),
    }
    refuse(file, faults)
    if isinstance(names, dict):
        names = [names[str(number)] for number in range(count)]
    base = f"{description.path}/" if description.path else ""
    splits = {
        split: [f"{base}{place}" for place in ([places] if isinstance(places, str) else places)]
        for split, places in entries.items()
    }
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
    with file_errors(file):
        names_file = root / (_placed(root, content["names"]) or content["names"])
    names = [line for line in read_lines(names_file) if line]
    splits = {split: [content[split]] for split in SPLITS if split in content}
    return Description(file, _checked(names, names_file), splits)


def describe_classes(file: Path) -> Description:
    """Return the description in Label Studio's classes.txt, beside ``images`` and ``labels``."""
    names = [line for line in read_lines(file) if line]
    return Description(file, _checked(names, file), {WHOLE: ["images"]})


def find_labelled(root: Path) -> dict[str, Path]:
    """Return Roboflow's list of Darknet classes per split."""
    label_files = {name: root / name / DARKNET for name in list_folders(root)}
    return {name: file for name, file in label_files.items() if file.is_file()}


def describe_labelled(root: Path) -> Description:
    """Return the description of Roboflow's Darknet export: one list of classes per split."""
    label_files = find_labelled(root)
    names = {tuple(line for line in read_lines(file) if line) for file in label_files.values()}
    differ = len(names) > 1
    refuse(root, {f"has splits with different files {DARKNET}; export them again": differ})
    first = next(iter(label_files.values()))
    return Description(first, _checked(names.pop(), first), {name: [name] for name in label_files})


def _checked(names: Sequence[str], file: Path) -> tuple[str, ...]:
    repeated = not names or len(set(names)) < len(names)
    rule = f"must hold different class names, got {first_few(names, 10)}"
    refuse(file, {rule: repeated})
    return tuple(names)


def convert(description: Description) -> Parts:
    """Return the splits of a YOLO dataset."""
    root = description.source.parent
    if description.source.name == DARKNET:
        root = root.parent
    images = Images(root)
    files: dict[str, list[str]] = {}
    missing = []
    for split, entries in description.splits.items():
        places = [place for entry in entries if (place := _placed(root, entry))]
        files[split] = sorted({file for place in places for file in _list_images(place, images)})
        if not files[split]:
            missing.append(f"{split}: {first_few(entries)}")
            del files[split]
    if not files:
        raise FileNotFoundError(
            f"{description.source} names folders without images in {root} ({first_few(missing)}); "
            f"{REMEDY}"
        )
    if missing:
        log(f"{description.source} names folders without images, skipped: {first_few(missing)}")
    return {split: partial(_part, description, names, images) for split, names in files.items()}


def _part(description: Description, files: Sequence[str], images: Images) -> Part:
    labels = {file: _label_file(images.folder, file) for file in files}
    _report(description.source, labels, images.folder)
    photos = []
    for file, size in zip(files, images.sizes(files), strict=True):
        label = labels[file]
        shapes = [] if label is None else read_labels(label, description.names, size)
        photos.append(Photo(file, shapes, size, label))
    return to_part(photos, description.source, images, description.names)


def _list_images(entry: str, images: Images) -> list[str]:
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
    names = {nfc(str(label)) for label in labels.values() if label is not None}
    folders = {label.parent for label in labels.values() if label is not None}
    strays = [
        file
        for folder in sorted(folders)
        for file in sorted(folder.glob("*.txt"))
        if nfc(str(file)) not in names and file.stem not in NO_LABELS
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
        if not line:
            continue
        with file_errors(f"{file}, line {place}"):
            number, *shares = map(finite_number, line.split())
            count = len(shares)
            is_class = number.is_integer() and 0 <= number < len(names)
            inside = all(-OUTSIDE <= share <= 1 + OUTSIDE for share in shares)
            if not is_class or not inside or (count != 4 and (count < 6 or count % 2)):
                raise ValueError(
                    f"must hold a class from 0 to {len(names) - 1}, and the four numbers of a box "
                    "or the corners of a polygon, as shares of the image's sides from 0 to 1, got "
                    f"{format_value(line)}"
                )
        make = _box if count == 4 else _polygon
        shapes.append(make(names[int(number)], shares, size))
    return shapes


def _box(label: str, shares: Sequence[float], size: Size) -> Shape:
    x, y, width, height = shares
    box = ((x - width / 2) * size[0], (y - height / 2) * size[1], width * size[0], height * size[1])
    return Shape.from_box(label, box)


def _polygon(label: str, shares: Sequence[float], size: Size) -> Shape:
    points: list[Point] = [
        (x * size[0], y * size[1]) for x, y in zip(shares[::2], shares[1::2], strict=True)
    ]
    return Shape.from_polygons(label, [points])
