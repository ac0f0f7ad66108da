"""Shares of each class's training images, equal for folders, tar and parquet files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from datamodules.files.values import check_option
from datamodules.images.synsets import file_name


def check_share(share: float) -> float:
    """Return the share of the training images.

    Raises:
        ValueError: The share is not above 0 and at most 1.
    """
    return check_option("train_share", share, 0 < share <= 1, "above 0 and at most 1")


def first_by_name(
    names: Sequence[str] | None, labels: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """Return the indices of a share of each class's images, the first by name.

    Args:
        names: Paths of the images, compared by their names in class folders; None takes the first
            images of each class.
        labels: Label per image.
        share: Share of each class, at least one image.
    """
    order = range(len(labels))
    if names is not None:
        files = [file_name(name) for name in names]
        order = sorted(order, key=lambda i: (files[i], names[i]))  # type: ignore[assignment]
    quota = {k: math.ceil(share * n) for k, n in enumerate(np.bincount(labels).tolist())}
    indices = []
    for index in order:
        label = int(labels[index])
        if quota[label]:
            quota[label] -= 1
            indices.append(index)
    return np.array(sorted(indices), np.int64)


def share_notice(share: float, names: Sequence[str] | None) -> str:
    """Return the log line that says which images a share includes."""
    if names is None:
        return (
            f"data.train_share={share} takes the first rows of each class, as the shards lack file "
            "names; class folders would give other images"
        )
    return (
        f"data.train_share={share} takes the first images of each class by file name, such as "
        f"{min(map(file_name, names))}, as class folders with these names would"
    )
