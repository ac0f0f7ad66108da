"""Reads a COCO json and checks it before training."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.files.console import log
from datamodules.files.folders import first_few, require_names
from datamodules.files.integers import format_value, integer_value
from datamodules.files.json_entries import Entry, Values, check_entries, name_value, text_value
from datamodules.files.text_files import FolderNames, nfc, read_json
from datamodules.layouts.coco_boxes import OPTION, describe_unusable, unusable_boxes

REQUIRED_KEYS = {
    "categories": ("id", "name"),
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area"),
}
FAR = 10  # most sides of its image that a polygon's corner may lie outside
MAX_SIDE = 100_000  # of an image, in pixels
MIN_SIDE = 32  # mmdet's COCO configs drop smaller training images


@dataclass(frozen=True)
class CocoFacts:
    """Facts about a checked file.

    Attributes:
        class_names: Names in label order, which is the file's order, as in the toolkits.
        category_ids: Category id per label.
        num_images: Images in the file.
        num_boxed: Images with a box of these classes.
        num_small: Images with such a box that are too small for training.
        num_boxes: Boxes of these classes.
        num_crowds: Boxes of these classes that mark crowds.
        unusable: Positions of annotations that training excludes; see ``unusable_boxes``.
        files: Normalised paths of the images.
        absent: Labels without a box that evaluation counts.
    """

    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    num_images: int
    num_boxed: int
    num_small: int
    num_boxes: int
    num_crowds: int
    unusable: frozenset[int]
    files: frozenset[str]
    absent: tuple[int, ...]


def check_coco(
    content: Mapping[str, list[Entry]],
    path: Path,
    image_folder: Path,
    classes: Sequence[str] | None,
    *,
    with_mask: bool,
    training: bool,
    skip_unusable: bool = False,
) -> CocoFacts:
    """Check annotations against the MM toolkits' requirements and the images on disk.

    Args:
        content: Result of ``read_coco``.
        path: The json, for messages.
        image_folder: Folder that ``file_name`` entries are relative to.
        classes: Names to restrict the dataset to; None means all categories.
        with_mask: Check the masks too.
        training: Check that images for training remain after mmdet's filter.
        skip_unusable: Exclude unusable boxes from evaluation too.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: The content is wrong.
    """
    categories, images, annotations = (content[key] for key in REQUIRED_KEYS)
    for kind in ("categories", "images"):
        if not content[kind]:
            raise ValueError(f"{path}: the list {kind!r} is empty; add its entries")
    for kind in REQUIRED_KEYS:
        _check_unique(path, kind, [entry["id"] for entry in content[kind]])
    _check_unique(path, "category names", [category["name"] for category in categories])
    chosen = _select(path, categories, classes)
    _check_known(path, annotations, "image_id", {image["id"] for image in images})
    _check_known(path, annotations, "category_id", {category["id"] for category in categories})
    files = _check_files(path, image_folder, images)
    by_id = {image["id"]: image for image in images}
    _check_boxes(path, annotations)
    wanted = {category["id"] for category in chosen}
    boxes = [entry for entry in annotations if entry["category_id"] in wanted]
    unusable = unusable_boxes(annotations, by_id, wanted)
    if unusable:
        log(describe_unusable(path, annotations, unusable, len(boxes), skip=skip_unusable))
    usable = [one for place, one in enumerate(annotations) if place not in unusable]
    left_out = unusable if training or skip_unusable else {}
    if not training:
        _check_nan(path, annotations, left_out, wanted)
    if with_mask:
        _check_masks(path, annotations, by_id, unusable, left_out)
    boxed = {entry["image_id"] for entry in boxes}
    small = {image["id"] for image in images if min(image["width"], image["height"]) < MIN_SIDE}
    targets = [one for one in (usable if training or skip_unusable else annotations)
            if one["category_id"] in wanted and not one.get("iscrowd")]  # fmt: skip
    counted = {one["category_id"] for one in targets}
    facts = CocoFacts(
        class_names=tuple(str(category["name"]) for category in chosen),
        category_ids=tuple(category["id"] for category in chosen),
        num_images=len(images),
        num_boxed=len(boxed),
        num_small=len(boxed & small),
        num_boxes=len(boxes),
        num_crowds=sum(bool(entry.get("iscrowd")) for entry in boxes),
        unusable=frozenset(unusable),
        files=frozenset(files),
        absent=tuple(n for n, category in enumerate(chosen) if category["id"] not in counted),
    )
    if training:
        _check_remaining(path, facts, targets, small)
    return facts


def read_coco(path: Path, *, annotated: bool = True) -> dict[str, list[Entry]]:
    """Read an annotation file and check its form; ``check_coco`` checks its meaning.

    Args:
        path: The json.
        annotated: Require the list "annotations". COCO's image_info_test-*.json lack it; otherwise
            an empty one is added.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not JSON, or its entries differ from COCO's form.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"annotation file {path} does not exist; set data.train_annotations and "
            "data.val_annotations "
            "relative to data.root"
        )
    content = read_json(path)
    if not annotated and isinstance(content, dict):
        content.setdefault("annotations", [])
    return check_content(path, content)


def check_content(path: Path, content: Any) -> dict[str, list[Entry]]:
    """Return the lists of a COCO file with integral floats as integers.

    Raises:
        ValueError: The entries differ from COCO's form.
    """
    return check_entries(path, content, REQUIRED_KEYS, VALUES, "COCO files")


def _number(value: Any) -> float:
    # NaN passes, as training excludes such boxes; it would train on infinite ones.
    if _is_number(value):
        return value
    raise ValueError(f"must be a finite number, got {format_value(value)}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(float(str(value))) != math.inf


def _side(value: object) -> int:
    side = integer_value(value)
    if 1 <= side <= MAX_SIDE:
        return side
    raise ValueError(f"must be a number of pixels from 1 to {MAX_SIDE}, got {format_value(value)}")


def _flag(value: Any) -> int:
    if type(value) in (int, float, bool) and value in (0, 1):
        return int(value)
    raise ValueError(f"must be 0 or 1, got {format_value(value)}")


VALUES: Values = {
    "categories": {"id": integer_value, "name": name_value},
    "images": {"id": integer_value, "file_name": text_value, "height": _side, "width": _side},
    "annotations": {
        "id": integer_value,
        "image_id": integer_value,
        "category_id": integer_value,
        "area": _number,
        "iscrowd": _flag,
        "ignore": _flag,
    },
}


def _check_unique(path: Path, what: str, values: list[Any]) -> None:
    doubles = [value for value, count in Counter(values).items() if count > 1]
    if doubles:
        raise ValueError(
            f"{path} has duplicates among its {what}: {first_few(doubles)}; make them unique"
        )


def _check_known(path: Path, annotations: list[Entry], key: str, known: set[Any]) -> None:
    strays = [entry["id"] for entry in annotations if entry[key] not in known]
    if strays:
        raise ValueError(
            f"{len(strays)} annotations in {path} have an unknown {key}; "
            f"annotation ids: {first_few(strays)}"
        )


def _select(path: Path, categories: list[Entry], classes: Sequence[str] | None) -> list[Entry]:
    names = [str(category["name"]) for category in categories]
    wanted = set(names if classes is None else map(nfc, classes))
    if not wanted <= set(names):
        raise ValueError(
            f"data.classes and the categories of {path} differ: classes {sorted(wanted)}, "
            f"categories {sorted(names)}, not in the file: {sorted(wanted - set(names))}"
        )
    return [category for category in categories if str(category["name"]) in wanted]


def _check_remaining(path: Path, facts: CocoFacts, boxes: Iterable[Entry], small: set[int]) -> None:
    boxed = {entry["image_id"] for entry in boxes}
    if not boxed - small:
        crowds = facts.num_crowds
        raise ValueError(
            f"{path} has zero images left for training: of {facts.num_images} images "
            f"{facts.num_images - len(boxed)} lack a box of {list(facts.class_names)}"
            + f" besides {crowds} of crowds (iscrowd=1)" * bool(crowds)
            + f", and {len(small)} have a side below {MIN_SIDE} pixels"
        )


def _check_files(path: Path, folder: Path, images: list[Entry]) -> dict[str, int]:
    """Return the image ids by path, and set each ``file_name`` to its spelling on disk.

    Raises:
        ValueError: A file has two ids.
        FileNotFoundError: Files are missing.
    """
    ids: dict[str, int] = {}
    twice: list[str] = []
    missing: list[str] = []
    names = FolderNames(folder)
    real = folder.resolve()  # two splits may link to one folder
    for image in images:
        found = names.find(image["file_name"])
        if found is None:
            missing.append(str(folder / image["file_name"]))
            continue
        image["file_name"] = found
        first = ids.setdefault(os.path.normpath(real / image["file_name"]), image["id"])
        if first != image["id"]:
            twice.append(f"{image['file_name']} (ids {first} and {image['id']})")
    if twice:
        raise ValueError(
            f"{path} lists the same file under two image ids: {first_few(twice)}; keep one "
            "entry of each and give its annotations that image_id"
        )
    require_names(
        missing,
        f"images named in {path} do not exist",
        "unpack the images or set data.train_images and data.val_images relative to root",
    )
    return ids


def _check_boxes(path: Path, annotations: list[Entry]) -> None:
    malformed = [entry["id"] for entry in annotations if not _is_box(entry["bbox"])]
    if malformed:
        raise ValueError(
            f"{len(malformed)} annotations in {path} have a bbox that is not four finite numbers "
            f"[x, y, width, height]; annotation ids: {first_few(malformed)}"
        )


def _check_nan(
    path: Path, annotations: list[Entry], left_out: Collection[int], wanted: Collection[int]
) -> None:
    """Reject NaN in evaluated boxes: pycocotools lets any detection match them."""
    for place, entry in enumerate(annotations):
        numbers = [*entry["bbox"], entry["area"]]
        counts = place not in left_out and entry["category_id"] in wanted
        if counts and any(map(math.isnan, numbers)):
            raise ValueError(
                f"{path}: annotations[{place}]: bbox and area must be numbers, got "
                f"{format_value(entry['bbox'])} and {format_value(entry['area'])}; correct "
                f"them, or pass {OPTION}"
            )


def _is_box(box: object) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))


def _check_masks(
    path: Path,
    annotations: list[Entry],
    images: dict[Any, Entry],
    unusable: Collection[int],
    left_out: Collection[int],
) -> None:
    for place, entry in enumerate(annotations):
        if place in left_out:
            continue
        image = images[entry["image_id"]]
        fault = _mask_fault(entry.get("segmentation"), (image["height"], image["width"]))
        if fault:
            raise ValueError(
                f"annotation {entry['id']} in {path} (annotations[{place}]) {fault}; correct it, "
                f"or pass {f'{OPTION} or ' * (place in unusable)}data.with_mask=false with a "
                "box detector, such as head=retinanet"
            )


def _mask_fault(mask: object, size: tuple[int, int]) -> str | None:
    """Return what is wrong with a mask, polygons or run lengths, of an image (height, width).

    pycocotools trusts its input: any other mask would make it write outside its memory.
    """
    if isinstance(mask, list) and mask:
        return next(filter(None, (_polygon_fault(part, size) for part in mask)), None)
    if not isinstance(mask, dict) or not {"size", "counts"} <= mask.keys():
        return "lacks a segmentation"
    if mask["size"] != list(size):
        return (
            f"has a run-length mask of {mask['size']!r:.60} (height, width) in an image of "
            f"{list(size)}"
        )
    mask["size"] = list(size)  # pycocotools rejects floats
    if isinstance(mask["counts"], list):
        try:
            mask["counts"] = [integer_value(count) for count in mask["counts"]]
        except ValueError as error:
            return f"has a run length that {error}"
    counts = _run_lengths(mask["counts"])
    if counts is None:
        return f"has malformed run lengths: {mask['counts']!r:.60}"
    if sum(counts) != size[0] * size[1]:
        return f"has run lengths of {sum(counts)} pixels in an image of {size[0] * size[1]}"
    return None


def _polygon_fault(polygon: object, size: tuple[int, int]) -> str | None:
    if not isinstance(polygon, list):
        return f"must have polygons that are lists of numbers, got {polygon!r:.60}"
    if len(polygon) < 6 or len(polygon) % 2:
        return f"has a polygon of {len(polygon)} numbers; at least 6 are needed, for three corners"
    far = FAR * max(size)
    numbers = set(map(type, polygon)) <= {int, float}
    # COCO has forty million coordinates, so this checks each polygon as a whole.
    if numbers and -far <= min(polygon) and max(polygon) <= far and not math.isnan(sum(polygon)):
        return None
    stray = next(v for v in polygon if type(v) not in (int, float) or not -far <= v <= far)
    return f"has a polygon with the coordinate {stray!r:.60} in an image of {list(size)}"


def _run_lengths(counts: object) -> list[int] | None:
    """Return the lengths in a list or in pycocotools' text form; None if it is malformed.

    The text has five bits per character, lowest first, and a sixth bit that says more follow. From
    the third number on it holds differences to the last but one.
    """
    if isinstance(counts, list):
        return counts if all(0 <= count < 2**32 for count in counts) else None
    if not isinstance(counts, str):
        return None
    lengths: list[int] = []
    value = shift = 0
    for character in counts:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:  # the sign
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    return lengths if not shift and all(length >= 0 for length in lengths) else None
