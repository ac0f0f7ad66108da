"""Chooses the splits to train and validate with, and draws one if an export is undivided."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.base import check_minimum
from datamodules.files.folders import first_few
from datamodules.files.text_files import nfc
from datamodules.files.values import check_option

TRAIN = ("train", "training")
VAL = ("val", "valid", "validation")
TEST = ("test", "testing")


@dataclass(frozen=True)
class SplitOptions:
    """Options for the splits of an export.

    Attributes:
        train: Name of the training split; None for the usual names.
        val: Name of the validation split; None for the usual names.
        share: Share of the training images to validate with, if a validation split is missing.
        seed: Seed of the draw of these images.
    """

    train: str | None = None
    val: str | None = None
    share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_option("val_share", self.share, 0 < self.share < 1, "between 0 and 1, such as 0.1")
        check_minimum("split_seed", self.seed, 0)
        differ = self.train is None or self.train != self.val
        check_option("val_split", self.val, differ, "another split than data.train_split")


@dataclass(frozen=True)
class Choice:
    """The chosen splits.

    Attributes:
        train: Name of the training split.
        val: Name of the validation split; None draws it from the training split.
        unused: Names of the others.
    """

    train: str
    val: str | None
    unused: tuple[str, ...]


def choose(names: Collection[str], options: SplitOptions, where: object) -> Choice:
    """Choose the splits by their names.

    Raises:
        ValueError: The names leave open which split trains or validates.
    """
    train = _pick(names, options.train, TRAIN, "train_split", where)
    val = _pick(names, options.val, VAL, "val_split", where)
    if train is None:
        candidates = [name for name in names if name != val and name.lower() not in (*VAL, *TEST)]
        candidates = candidates or [name for name in names if name != val]
        if len(candidates) != 1:
            raise ValueError(
                f"{where} has the splits {first_few(sorted(names), 10)}, but a split named train "
                "is needed; pass data.train_split=<name> and data.val_split=<name>"
            )
        train = candidates[0]
    return Choice(train, val, tuple(name for name in names if name not in (train, val)))


def _pick(
    names: Collection[str], name: str | None, usual: Sequence[str], option: str, where: object
) -> str | None:
    """Return the split of a name, or of a usual one; None without a usual one."""
    matches = [split for split in names if split == name or (not name and split.lower() in usual)]
    if len(matches) > 1 or (name and not matches):
        count = f"has {len(matches)} such splits" if matches else f"lacks the split {name}"
        raise ValueError(f"{where} {count}; pass data.{option}=<one of {first_few(names, 10)}>")
    return matches[0] if matches else None


def draw_names(names: Sequence[str], options: SplitOptions, where: object = "the set") -> set[str]:
    """Return the names of images to validate with; equal names and seeds give equal draws.

    Args:
        names: Names of the images.
        options: Options with share and seed.
        where: Name of the dataset in messages.

    Raises:
        ValueError: There are fewer than two images.
    """
    if len(names) < 2:
        raise ValueError(
            f"{where} has {len(names)} image{'s' * (len(names) != 1)}, but training and validation "
            "need one each; add images"
        )
    count = min(max(1, round(options.share * len(names))), len(names) - 1)
    return set(_shuffled(names, options)[:count])


def _shuffled(names: Sequence[str], options: SplitOptions) -> list[str]:
    def place(name: str) -> bytes:
        key = nfc(f"{options.seed}/{name}").encode("utf-8", "surrogateescape")
        return hashlib.sha256(key).digest()

    return sorted(names, key=place)


def draw_with_classes(
    names: Sequence[str],
    options: SplitOptions,
    num_classes: int,
    classes_of: Callable[[str], Collection[int]],
    where: object = "the set",
) -> set[str]:
    """Return ``draw_names``, with images exchanged so that each class is trained and validated.

    A class of a single image is trained. Images are exchanged one for one where other classes allow
    it.

    Args:
        names: Names of the images.
        options: Options with share and seed.
        num_classes: Number of classes.
        classes_of: Returns the labels in an image; called for the images that decide.
        where: Name of the dataset in messages.

    Raises:
        ValueError: There are fewer than two images.
    """
    val = draw_names(names, options, where)
    order, labels = _shuffled(names, options), functools.cache(lambda name: {*classes_of(name)})
    train = {*order} - val

    def is_spare(name: str, part: set[str], leaving: Collection[int] = ()) -> bool:
        """Return True if a part has all classes of one of its images in others as well."""
        rest, classes = part - {name}, labels(name) - {*leaving}
        return bool(rest) and all(any(k in labels(n) for n in rest) for k in classes)

    for label in range(num_classes):
        for target, source in ((train, val), (val, train)):
            if any(label in labels(name) for name in target):
                continue
            bearers = [name for name in order if name in source and label in labels(name)]
            leaving = [label] if target is train and len(bearers) == 1 else []
            for name in [n for n in bearers if is_spare(n, source, leaving)][:1]:
                source.remove(name)
                rest = [n for n in (order if target is train else reversed(order)) if n in target]
                returned = [n for n in rest if is_spare(n, target | {name})][:1]
                target.add(name)
                target.difference_update(returned)
                source.update(returned)
    return val


def divide(
    content: Mapping[str, Any], options: SplitOptions, where: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a COCO file's images into training and validation, each class in both if possible."""
    names = [image["file_name"] for image in content["images"]]
    files = {image["id"]: image["file_name"] for image in content["images"]}
    numbers = {entry["id"]: label for label, entry in enumerate(content["categories"])}
    labels: dict[str, set[int]] = {name: set() for name in names}
    for entry in content["annotations"]:
        name, label = files.get(entry["image_id"]), numbers.get(entry["category_id"])
        if name is not None and label is not None:  # check_coco refuses other ids
            labels[name].add(label)
    drawn_names = draw_with_classes(names, options, len(numbers), labels.__getitem__, where)
    ids = {image["id"] for image in content["images"] if image["file_name"] in drawn_names}

    def part(validates: bool) -> dict[str, Any]:
        return {
            **content,
            "images": [entry for entry in content["images"] if (entry["id"] in ids) == validates],
            "annotations": [
                entry for entry in content["annotations"] if (entry["image_id"] in ids) == validates
            ],
        }

    return part(False), part(True)


def draw_notice(count: int, total: int, options: SplitOptions) -> str:
    """Return the message on the images drawn for validation."""
    return (
        f"{count} of {total} images are drawn for validation (data.val_share={options.share}, "
        f"data.split_seed={options.seed})"
    )
