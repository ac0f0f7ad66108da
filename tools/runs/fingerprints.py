"""Short names of a run's data, by which other runs recognise the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules import BaseDataModule
from datamodules.base import Split

DIGITS = 12
MEASURED = 200  # files whose sizes are looked at, evenly spaced
IN_MEMORY = ("labels", "flags", "images")  # arrays of integers of a dataset


def fingerprints(datamodule: BaseDataModule) -> dict[str, str | None]:
    """Return fingerprints of the targets, such as the classes, and of the validation data.

    A sample is known by its file and the folder around it, whatever lies above; some are measured.
    A set with an annotation file of its own is known by that file's content, too.

    Returns:
        One of each name in ``Family.targets``, and ``val``; None without validation data. Sets with
        labels have ``val content`` and ``test content``, see ``content_fingerprint``.
    """
    targets = {name: _digest(content) for name, content in datamodule.target_identity().items()}
    if "val" not in datamodule.sizes():
        return {**targets, "val": None}
    annotations = getattr(datamodule, "annotations_digest", None)
    splits: tuple[Split, ...] = ("val",)
    if annotations is None and "test" in datamodule.sizes():
        splits = ("val", "test")
    parts: list[Any] = []
    for dataset in map(datamodule.dataset, splits):
        files = [dataset.describe(index) for index in range(len(dataset))]
        parts += [sorted(_shorten(file) for file in files), _sizes(files)]
    if annotations is not None:
        parts.append(annotations)
    contents = {f"{split} content": content_fingerprint(datamodule, split) for split in splits}
    return {**targets, "val": _digest(parts), **{name: it for name, it in contents.items() if it}}


def training_fingerprints(datamodule: BaseDataModule) -> dict[str, str]:
    """Return fingerprints of the training data: of files and, in sets with labels, of content."""
    prints = {
        "train": split_fingerprint(datamodule, "train"),
        "train content": content_fingerprint(datamodule, "train"),
    }
    return {name: it for name, it in prints.items() if it}


def split_fingerprint(datamodule: BaseDataModule, split: Split) -> str | None:
    """Return the fingerprint of a split's files, or None if the data lack it."""
    if split not in datamodule.sizes():
        return None
    dataset = datamodule.dataset(split)
    files = [dataset.describe(index) for index in range(len(dataset))]
    return _digest([sorted(map(_shorten, files)), _sizes(files)])


def content_fingerprint(datamodule: BaseDataModule, split: Split) -> str | None:
    """Return the fingerprint of a split's labels, and of its images if they lie in memory.

    Samples count in their order. Boxes are those of training, as ``val`` has the others. None means
    that the split lacks such arrays.
    """
    if split not in datamodule.sizes():
        return None
    annotations: str | None = getattr(datamodule, "train_annotations_digest", None)
    if annotations is not None and split == "train":
        return annotations[:DIGITS]
    arrays = vars(datamodule.dataset(split).dataset)
    memory = [arrays[name] for name in IN_MEMORY if isinstance(arrays.get(name), np.ndarray)]
    content = hashlib.sha256()
    for array in memory:
        content.update(np.ascontiguousarray(array).data)
    return content.hexdigest()[:DIGITS] if memory else None


def _shorten(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _sizes(files: Sequence[str]) -> list[int | None]:
    """Return the sizes of some files; None for images inside of other files."""
    sample = sorted(files)[:: max(1, len(files) // MEASURED)]
    return [path.stat().st_size if (path := Path(file)).is_file() else None for file in sample]


def _digest(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
