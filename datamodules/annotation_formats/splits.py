"""Chooses the splits to train and validate with, and draws one if an export is undivided."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
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

    def place(name: str) -> bytes:
        key = nfc(f"{options.seed}/{name}").encode("utf-8", "surrogateescape")
        return hashlib.sha256(key).digest()

    return set(sorted(names, key=place)[:count])


def divide(
    content: Mapping[str, Any], options: SplitOptions, where: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a COCO file's images into training and validation."""
    names = [image["file_name"] for image in content["images"]]
    drawn_names = draw_names(names, options, where)
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
