"""Labelled points as ply files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


def write_ply(
    file: BinaryIO,
    coord: NDArray[Any],
    color: NDArray[Any],
    labels: NDArray[Any],
    comments: Sequence[str],
) -> None:
    """Write points in doubles with colours from 0 to 255 and labels as a binary ply file.

    Args:
        file: Open for writing.
        coord: (N, 3).
        color: (N, 3).
        labels: (N,).
        comments: Lines for the header, such as the names of classes.
    """
    fields = [
        *((axis, "<f8") for axis in "xyz"),
        *((name, "u1") for name in ("red", "green", "blue")),
        ("label", "<i4"),
    ]
    vertices = np.empty(len(coord), dtype=fields)
    for index, axis in enumerate("xyz"):
        vertices[axis] = coord[:, index]
    for index, name in enumerate(("red", "green", "blue")):
        vertices[name] = np.clip(np.round(color[:, index]), 0, 255)
    vertices["label"] = labels
    kinds = {"<f8": "double", "u1": "uchar", "<i4": "int"}
    lines = [
        "ply", "format binary_little_endian 1.0",
        *(f"comment {line}" for line in comments),
        f"element vertex {len(coord)}",
        *(f"property {kinds[code]} {name}" for name, code in fields),
        "end_header",
    ]  # fmt: skip
    file.write(("\n".join(lines) + "\n").encode())
    file.write(vertices.tobytes())
