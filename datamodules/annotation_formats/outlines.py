"""Geometry of annotated shapes: boxes, areas, outlines and run lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.files.decoding import MAX_PIXELS

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # x, y, width, height

CORNERS = 64  # of the polygon that approximates an ellipse


def bounds(points: Sequence[Point]) -> Box:
    """Return the box around points."""
    x, y = zip(*points, strict=True)
    return min(x), min(y), max(x) - min(x), max(y) - min(y)


def signed_area(points: Sequence[Point]) -> float:
    """Return the area of a polygon, negative if its corners run anticlockwise (y down)."""
    x, y = np.array(points, np.float64).T
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def rotate(points: Sequence[Point], centre: Point, degrees: float) -> list[Point]:
    """Return points rotated clockwise (with y pointing down) about a centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    (cx, cy) = centre
    return [
        (cx + (x - cx) * cos - (y - cy) * sin, cy + (x - cx) * sin + (y - cy) * cos)
        for x, y in points
    ]


def corners(x: float, y: float, width: float, height: float) -> list[Point]:
    """Return the corners of a box."""
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def ellipse(centre: Point, radii: Point, degrees: float = 0.0) -> list[Point]:
    """Return an ellipse as a polygon."""
    angles = [2 * math.pi * step / CORNERS for step in range(CORNERS)]
    points = [
        (centre[0] + radii[0] * math.cos(angle), centre[1] + radii[1] * math.sin(angle))
        for angle in angles
    ]
    return rotate(points, centre, degrees)


def blank_mask(size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return an empty mask (H, W) for an image of (width, height).

    Raises:
        ValueError: The image is larger than ``MAX_PIXELS``.
    """
    width, height = size
    if min(size) < 1 or width * height > MAX_PIXELS:
        raise ValueError(
            f"an image with a mask must have 1 to {MAX_PIXELS:,} pixels, got {width}x{height}"
        )
    return np.zeros((height, width), np.bool_)


def run_lengths(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return a mask (H, W) as COCO's run lengths: column by column, background first."""
    flat = mask.T.reshape(-1)
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    ends = np.concatenate(([0], changes, [flat.size]))
    counts = np.diff(ends).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def mask_bounds(mask: NDArray[np.bool_]) -> Box:
    """Return the box around the set pixels of a mask; an empty box if all are unset."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return 0.0, 0.0, 0.0, 0.0
    x_min, top = int(columns[0]), int(rows[0])
    return float(x_min), float(top), float(columns[-1] + 1 - x_min), float(rows[-1] + 1 - top)
