"""Names of ImageNet's classes and images in its various copies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from timm.data import ImageNetInfo

SYNSETS: tuple[str, ...] = tuple(ImageNetInfo().label_names())  # type: ignore[no-untyped-call]
# Share of the thousand names that must equal timm's in order; a few are spelt differently.
SAME_NAMES = 0.9
PREFIX = re.compile(r"(n\d{8})_")


def to_synsets(names: Sequence[str]) -> tuple[str, ...]:
    """Return ImageNet's thousand names as synsets if they are in its order, else the names.

    Source: timm's list of both.
    """
    if len(names) != len(SYNSETS):
        return tuple(names)
    info: Any = ImageNetInfo()
    descriptions = (info.label_name_to_description(synset) for synset in SYNSETS)
    equal = [_first(first) == _first(two) for first, two in zip(names, descriptions, strict=True)]
    return SYNSETS if sum(equal) >= SAME_NAMES * len(equal) else tuple(names)


def synsets_of_files(files: Mapping[int, str], count: int) -> tuple[str, ...] | None:
    """Return the synsets if one training file per label names them in order; else None.

    Args:
        files: Name of an image per label, such as ``n01440764_10026.JPEG``.
        count: Number of classes.
    """
    if count != len(SYNSETS):
        return None
    matches = [PREFIX.match(files.get(label, "")) for label in range(count)]
    return SYNSETS if [match and match[1] for match in matches] == list(SYNSETS) else None


def file_name(path: str) -> str:
    """Return an ImageNet image's name in class folders; other paths stay as they are.

    Hugging Face's copy appends the synset: ``n01440764_10026_n01440764.JPEG``.
    """
    match = PREFIX.match(path.rpartition("/")[2])
    return re.sub(rf"_{match[1]}(?=\.\w+$)", "", path) if match else path


def _first(lemmas: str) -> str:
    return lemmas.partition(",")[0].strip().lower()
