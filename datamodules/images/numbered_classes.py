"""Checks of numeric labels: occurring classes and gaps between the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from datamodules.files.folders import first_few
from datamodules.files.values import refuse

Labels = NDArray[np.int64]


def check_listed(folder: Path, labels: Mapping[str, Labels], remedy: str) -> None:
    """Check that labels without a list of classes still determine the classes.

    Args:
        folder: Folder of the dataset, for the message.
        labels: Labels of "train" and "val", from 0 on.
        remedy: Way to list the classes.

    Raises:
        ValueError: Validation has labels that training lacks, or training lacks half of them.
    """
    train, val = _sets(labels)
    strays, last = sorted(val - train), max(train)
    rule = f"has labels up to {last}, but training has only {len(train)} of them; {remedy}"
    faults = {
        f"has validation labels that training lacks ({remedy})": strays,
        rule: 2 * len(train) <= last,
    }
    refuse(folder, faults)


def warn_of_absent(folder: Path, labels: Mapping[str, Labels], names: Sequence[str]) -> None:
    """Warn of classes without training or validation images."""
    for split, occurring in zip(("training", "validation"), _sets(labels), strict=True):
        absent = [name for label, name in enumerate(names) if label not in occurring]
        if absent:
            rank_zero_warn(f"{folder} lacks {split} images of {first_few(absent)}")


def _sets(labels: Mapping[str, Labels]) -> tuple[set[int], set[int]]:
    train, val = ({*np.unique(labels[split]).tolist()} for split in ("train", "val"))
    return train, val
