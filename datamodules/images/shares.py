"""A share of each class's training images, the same in folders, tar and parquet files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from datamodules.images.synsets import file_name


def checked_share(share: float) -> float:
    """Return the share of the training images.

    Raises:
        ValueError: It is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"data.train_share must be above 0 and at most 1; got {share}")
    return share


def first_by_name(
    names: Sequence[str] | None, labels: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """Return the places of a share of each class's images, the first by their names.

    Args:
        names: Paths of the images, which are compared as class folders would have them; None
            takes the first images of each class.
        labels: Of the images.
        share: At least one image of each class.
    """
    order = range(len(labels))
    if names is not None:
        files = [file_name(name) for name in names]
        order = sorted(order, key=lambda i: (files[i], names[i]))  # type: ignore[assignment]
    quota = {k: math.ceil(share * n) for k, n in enumerate(np.bincount(labels).tolist())}
    kept = []
    for index in order:
        label = int(labels[index])
        if quota[label]:
            quota[label] -= 1
            kept.append(index)
    return np.array(sorted(kept), np.int64)


def share_notice(share: float, names: Sequence[str] | None) -> str:
    """Return the line that says which images a share has."""
    if names is None:
        return (
            f"data.train_share={share} takes the first rows of each class, which have no file "
            "names: not the same images as of class folders"
        )
    return (
        f"data.train_share={share} takes the first images of each class by file name, such as "
        f"{min(map(file_name, names))}: the same as of class folders with these names"
    )
