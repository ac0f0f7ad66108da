"""Check labels that are numbers: which classes occur, and whether the numbers have gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from datamodules.files import first_few

Labels = NDArray[np.int64]


def refuse_unlisted(folder: Path, labels: Mapping[str, Labels], remedy: str) -> None:
    """Refuse labels of a set that does not list its classes if some classes cannot be known.

    Args:
        folder: Of the set, for the message.
        labels: From 0 on, of "train" and "val".
        remedy: How the classes are listed.

    Raises:
        ValueError: Validation has labels that training lacks, or training lacks half of them.
    """
    train, val = _sets(labels)
    strays, last = sorted(val - train), max(train)
    if strays:
        raise ValueError(
            f"{folder}: validation has labels that training lacks: {first_few(strays)}; {remedy}"
        )
    if 2 * len(train) <= last:
        raise ValueError(
            f"{folder}: labels go up to {last}, but training has only {len(train)} of them; "
            f"{remedy}"
        )


def warn_of_absent(folder: Path, labels: Mapping[str, Labels], names: Sequence[str]) -> None:
    """Warn of classes without training images, and of those without validation images."""
    for split, there in zip(("training", "validation"), _sets(labels), strict=True):
        absent = [name for label, name in enumerate(names) if label not in there]
        if absent:
            rank_zero_warn(f"{folder} has no {split} images of {first_few(absent)}")


def _sets(labels: Mapping[str, Labels]) -> tuple[set[int], set[int]]:
    train, val = ({*np.unique(labels[split]).tolist()} for split in ("train", "val"))
    return train, val
