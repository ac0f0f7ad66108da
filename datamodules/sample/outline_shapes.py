"""Masks as COCO writes them: outlines along pixel edges, or run lengths for masks with holes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Point = tuple[int, int]  # (x, y)


def bounding_box(mask: Mask) -> tuple[int, int, int, int]:
    """(x, y, width, height) of the smallest box around a mask (H, W) that is not empty."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, left = int(rows[0]), int(columns[0])
    return left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1


def encode_mask(mask: Mask) -> list[list[int]] | dict[str, Any]:
    """Polygons of a mask (H, W), or run lengths if it has holes, which polygons lack."""
    loops = outlines(mask)
    if any(signed_area(loop) < 0 for loop in loops):
        return {"size": list(mask.shape), "counts": run_lengths(mask)}
    return [[coordinate for point in loop for coordinate in point] for loop in loops]


def run_lengths(mask: Mask) -> list[int]:
    """COCO's counts: lengths of alternating runs, down the columns, the first of background."""
    flat = np.concatenate([[False], mask.flatten(order="F")])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    return [int(run) for run in np.diff(np.concatenate([[0], changes, [mask.size]]))]


def outlines(mask: Mask) -> list[list[Point]]:
    """Corners of all closed borders of a mask; the mask lies on the right of each step.

    Diagonal neighbours count as separate, so no outline crosses itself.
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


def signed_area(loop: list[Point]) -> float:
    """Area within a loop, negative for the border of a hole."""
    corners = np.array(loop, dtype=np.int64)
    x, y = corners.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _border_edges(mask: Mask) -> dict[Point, list[Point]]:
    """Unit steps between mask and background, by starting corner, with the mask on the right."""
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    # The neighbour on a side, and the corners of the shared edge, (x, y) from the pixel's own.
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
