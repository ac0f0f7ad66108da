"""Masks in COCO's form: outlines along pixel edges, or run lengths for masks with holes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.annotation_formats.outlines import mask_bounds, run_lengths, signed_area

Mask = NDArray[np.bool_]
Point = tuple[int, int]  # (x, y)


def bounding_box(mask: Mask) -> tuple[int, ...]:
    """Return (x, y, width, height) of the smallest box around a non-empty mask (H, W)."""
    return tuple(map(int, mask_bounds(mask)))


def encode_mask(mask: Mask) -> list[list[int]] | dict[str, Any]:
    """Return the polygons of a mask (H, W), or run lengths if it has holes."""
    loops = outlines(mask)
    if any(signed_area(loop) < 0 for loop in loops):
        return run_lengths(mask)
    return [[coordinate for point in loop for coordinate in point] for loop in loops]


def outlines(mask: Mask) -> list[list[Point]]:
    """Return the corners of all closed borders of a mask; each step has the mask on its right.

    Diagonal neighbours count as separate, so outlines never cross themselves.
    """
    following = _border_edges(mask)
    loops = []
    while following:
        start = min(following)
        loop: list[Point] = []
        position, heading = start, (0, 0)
        while not (position == start and loop):
            ends = following[position]
            right = (position[0] - heading[1], position[1] + heading[0])
            end = right if right in ends else ends[0]
            ends.remove(end)
            if not ends:
                del following[position]
            step = (end[0] - position[0], end[1] - position[1])
            if step != heading:
                loop.append(position)
            position, heading = end, step
        loops.append(loop)
    return loops


def _border_edges(mask: Mask) -> dict[Point, list[Point]]:
    """Return unit steps between mask and background by starting corner, mask on the right."""
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    # The neighbour on each side, and the corners of the shared edge, (x, y) from the pixel's own.
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),
        (padded[1:-1, 2:], (1, 0), (1, 1)),
        (padded[2:, 1:-1], (1, 1), (0, 1)),
        (padded[1:-1, :-2], (0, 1), (0, 0)),
    )
    edges: dict[Point, list[Point]] = {}
    for neighbour, first, second in sides:
        for y, x in np.argwhere(inside & ~neighbour).tolist():
            edges.setdefault((x + first[0], y + first[1]), []).append(
                (x + second[0], y + second[1])
            )
    return edges
