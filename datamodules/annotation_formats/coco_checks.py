"""Reads a COCO json and checks it before training."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, Field, Strict, TypeAdapter, with_config
from typing_extensions import TypedDict

from datamodules.annotation_formats.coco_boxes import OPTION, describe_unusable, unusable_boxes
from datamodules.files.console import log
from datamodules.files.folders import require_names
from datamodules.files.text_files import FolderNames, Name, nfc, read_json
from datamodules.files.values import Integer, Text, file_errors, format_value, integer_value, refuse

FAR = 10  # most sides of its image that a polygon's corner may lie outside
MAX_SIDE = 100_000  # of an image, in pixels
MIN_SIDE = 32  # mmdet's COCO configs drop smaller training images

Entry = dict[str, Any]


def _number(value: Any) -> Any:
    # NaN passes, as training excludes such boxes; it would train on infinite ones.
    if type(value) in (int, float) and abs(float(str(value))) != math.inf:
        return value
    raise ValueError(f"must be a finite number, got {format_value(value)}")


def _flag(value: Any) -> int:
    return integer_value(int(value) if isinstance(value, bool) else value)


Number = Annotated[Any, BeforeValidator(_number)]
Side = Annotated[Integer, Field(ge=1, le=MAX_SIDE)]
Flag = Annotated[int, BeforeValidator(_flag), Field(ge=0, le=1)]
Box = Annotated[list[Number], Strict(), Field(min_length=4, max_length=4)]


@with_config(extra="allow")
class Category(TypedDict):
    """Class of a COCO file."""

    id: Integer
    name: Name


@with_config(extra="allow")
class ImageEntry(TypedDict):
    """Image of a COCO file."""

    id: Integer
    file_name: Text
    height: Side
    width: Side


@with_config(extra="allow")
class Annotation(TypedDict):
    """Object of a COCO file."""

    id: Integer
    image_id: Integer
    category_id: Integer
    bbox: Box
    area: Number
    iscrowd: NotRequired[Flag]
    ignore: NotRequired[Flag]


@with_config(extra="allow")
class CocoFile(TypedDict):
    """Content of a COCO file."""

    categories: Annotated[list[Category], Field(min_length=1)]
    images: Annotated[list[ImageEntry], Field(min_length=1)]
    annotations: list[Annotation]


COCO_FILE = TypeAdapter(CocoFile)
KINDS = ("categories", "images", "annotations")


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
    labels: Mapping[int, Path] | None = None,
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
        labels: File of an image's objects, by the image's id, where each has its own.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: The content is wrong.
    """
    categories, images, annotations = (content[key] for key in KINDS)
    ids = {kind: Counter(entry["id"] for entry in content[kind]) for kind in KINDS}
    names = Counter(category["name"] for category in categories)
    faults = {
        f"has duplicates among its {kind}; make them unique": [
            value for value, count in counts.items() if count > 1
        ]
        for kind, counts in {**ids, "category names": names}.items()
    }
    for kind, key in (("images", "image_id"), ("categories", "category_id")):
        strays = [entry["id"] for entry in annotations if entry[key] not in ids[kind]]
        faults[f"has {len(strays)} annotations with an unknown {key}; annotation ids"] = strays
    refuse(path, faults)
    selection = _select(path, categories, classes)
    files = _check_files(path, image_folder, images)
    by_id = {image["id"]: image for image in images}
    class_ids = {category["id"] for category in selection}
    boxes = [entry for entry in annotations if entry["category_id"] in class_ids]
    unusable = unusable_boxes(annotations, by_id, class_ids)
    if unusable:
        log(describe_unusable(path, annotations, unusable, len(boxes), skip=skip_unusable))
    usable = [item for place, item in enumerate(annotations) if place not in unusable]
    left_out = unusable if training or skip_unusable else {}
    if not training:
        _check_nan(path, annotations, left_out, class_ids)
    if with_mask:
        _check_masks(path, annotations, by_id, unusable, left_out, labels or {})
    boxed = {entry["image_id"] for entry in boxes}
    small = {image["id"] for image in images if min(image["width"], image["height"]) < MIN_SIDE}
    counted = {item["category_id"] for item in (usable if skip_unusable else annotations)
               if not item.get("iscrowd")}  # fmt: skip
    facts = CocoFacts(
        class_names=tuple(str(category["name"]) for category in selection),
        category_ids=tuple(category["id"] for category in selection),
        num_images=len(images),
        num_boxed=len(boxed),
        num_small=len(boxed & small),
        num_boxes=len(boxes),
        num_crowds=sum(bool(entry.get("iscrowd")) for entry in boxes),
        unusable=frozenset(unusable),
        files=frozenset(files),
        absent=tuple(n for n, category in enumerate(selection) if category["id"] not in counted),
    )
    if training:
        _check_remaining(path, facts, usable, small)
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
    content = read_json(path)
    if not annotated and isinstance(content, dict):
        content.setdefault("annotations", [])
    return check_content(path, content)


def check_content(path: Path, content: Any) -> dict[str, list[Entry]]:
    """Return the lists of a COCO file with integral floats as integers.

    Raises:
        ValueError: The entries differ from COCO's form.
    """
    with file_errors(path):
        return dict(COCO_FILE.validate_python(content))  # type: ignore[arg-type]


def _select(path: Path, categories: list[Entry], classes: Sequence[str] | None) -> list[Entry]:
    names = [str(category["name"]) for category in categories]
    class_ids = set(names if classes is None else map(nfc, classes))
    differ = (
        f"has the categories {sorted(names)}, data.classes are {sorted(class_ids)}; not in the file"
    )
    refuse(path, {differ: sorted(class_ids - set(names))})
    return [category for category in categories if str(category["name"]) in class_ids]


def _check_remaining(
    path: Path, facts: CocoFacts, usable: Iterable[Entry], small: Collection[int]
) -> None:
    selection = set(facts.category_ids)
    boxed = {
        entry["image_id"]
        for entry in usable
        if entry["category_id"] in selection and not entry.get("iscrowd")
    }
    lacking = facts.num_images - len(boxed)
    rule = (
        f"has zero images left for training: of {facts.num_images} images {lacking} lack a box of "
        f"{list(facts.class_names)}"
        + f" besides {facts.num_crowds} of crowds (iscrowd=1)" * bool(facts.num_crowds)
        + f", and {len(small)} have a side below {MIN_SIDE} pixels"
    )
    refuse(path, {rule: not boxed - set(small)})


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
        file_name = names.find(image["file_name"])
        if file_name is None:
            missing.append(str(folder / image["file_name"]))
            continue
        image["file_name"] = file_name
        first = ids.setdefault(os.path.normpath(real / image["file_name"]), image["id"])
        if first != image["id"]:
            twice.append(f"{image['file_name']} (ids {first} and {image['id']})")
    remedy = "keep one entry of each and give its annotations that image_id"
    refuse(path, {f"lists the same file under two image ids ({remedy})": twice})
    require_names(
        missing,
        f"images named in {path} do not exist",
        "unpack the images or set data.train_images and data.val_images relative to root",
    )
    return ids


def _check_nan(
    path: Path, annotations: list[Entry], left_out: Collection[int], categories: Collection[int]
) -> None:
    """Reject NaN in evaluated boxes: pycocotools lets any detection match them."""
    unclear = [
        f"annotations[{place}]: bbox and area must be numbers, got "
        f"{format_value(entry['bbox'])} and {format_value(entry['area'])}"
        for place, entry in enumerate(annotations)
        if place not in left_out
        and entry["category_id"] in categories
        and any(map(math.isnan, [*entry["bbox"], entry["area"]]))
    ]
    refuse(path, {f"has NaN in boxes (correct them, or pass {OPTION})": unclear})


def _check_masks(
    path: Path,
    annotations: list[Entry],
    images: dict[Any, Entry],
    unusable: Collection[int],
    left_out: Collection[int],
    labels: Mapping[int, Path],
) -> None:
    for place, entry in enumerate(annotations):
        if place in left_out:
            continue
        image = images[entry["image_id"]]
        fault = _mask_fault(entry.get("segmentation"), (image["height"], image["width"]))
        if fault:
            file = labels.get(entry["image_id"])
            where = f"annotation {entry['id']} in {path} (annotations[{place}])"
            raise ValueError(
                f"{file or where} {fault}; correct it, or pass "
                f"{f'{OPTION} or ' * (place in unusable)}data.with_mask=false with a "
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
