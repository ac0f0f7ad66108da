"""Pictures of labelled point clouds from two views."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
VIEWS = {"from above": 90.0, "at an angle": 35.0}  # elevation of the eye in degrees
AZIMUTH = 30.0
SIDE, MARGIN, LINE = 420, 12, 16  # pixels
UNKNOWN: Colour = (190, 190, 190)
GOLDEN = 0.618034  # steps of hues that stay apart


def palette(count: int) -> NDArray[np.uint8]:
    """Return distinguishable colours (K, 3)."""
    colours = [
        colorsys.hsv_to_rgb(
            (index * GOLDEN) % 1, (0.75, 0.5)[index % 2], (0.85, 0.65)[index // 2 % 2]
        )
        for index in range(count)
    ]
    return (np.array(colours) * 255).round().astype(np.uint8)


def project(coord: NDArray[Any], elevation: float) -> NDArray[np.float64]:
    """Return x, y on the picture and the distance (N, 3) of points seen from far away.

    Args:
        coord: (N, 3), z upwards.
        elevation: Of the eye over the horizon in degrees; 90 is from above.
    """
    turn, tilt = np.radians(AZIMUTH if elevation < 90 else 0), np.radians(elevation)
    x = coord[:, 0] * np.cos(turn) - coord[:, 1] * np.sin(turn)
    away = coord[:, 0] * np.sin(turn) + coord[:, 1] * np.cos(turn)
    up = coord[:, 2] * np.cos(tilt) + away * np.sin(tilt)
    return np.stack([x, -up, away * np.cos(tilt) - coord[:, 2] * np.sin(tilt)], axis=1)


def draw_points(coord: NDArray[Any], colours: NDArray[Any], elevation: float) -> Image.Image:
    """Draw points as squares; near ones cover far ones.

    Args:
        coord: (N, 3).
        colours: RGB (N, 3) from 0 to 255.
        elevation: See ``project``.
    """
    points = project(coord, elevation)
    extent = np.ptp(points[:, :2], axis=0).max() or 1.0
    low = points[:, :2].min(0)
    place = (points[:, :2] - low) / extent * (SIDE - 2 * MARGIN) + MARGIN
    height = int(place[:, 1].max()) + MARGIN
    canvas = np.full((height, SIDE, 3), 255, dtype=np.uint8)
    order = np.argsort(-points[:, 2])
    pixels = place[order].astype(int)
    size = 3 if len(coord) < 40_000 else 1
    for dx in range(size):
        for dy in range(size):
            rows = (pixels[:, 1] + dy).clip(0, height - 1)
            canvas[rows, (pixels[:, 0] + dx).clip(0, SIDE - 1)] = colours[order]
    return Image.fromarray(canvas)


def below_ceiling(coord: NDArray[Any], share: float = 0.8) -> NDArray[np.bool_]:
    """Return True for points below a share of the height, so that a room can be seen from above."""
    low, high = coord[:, 2].min(), coord[:, 2].max()
    return coord[:, 2] <= low + share * (high - low)


def draw_cloud(
    coord: NDArray[Any],
    colours_by_title: Mapping[str, NDArray[Any]],
    legend: Sequence[tuple[str, Colour]],
) -> Image.Image:
    """Draw a cloud in several colourings, each from two views, with a legend.

    Args:
        coord: (N, 3).
        colours_by_title: Colours (N, 3) by title.
        legend: Names and colours of the classes that occur.
    """
    mask = below_ceiling(coord)
    rows = [
        [
            draw_points(coord[mask], colours[mask], elevation)
            for colours in colours_by_title.values()
        ]
        for elevation in VIEWS.values()
    ]
    heights = [max(picture.height for picture in row) + LINE for row in rows]
    columns = max(1, (SIDE * len(colours_by_title)) // 110)
    lines = -(-len(legend) // columns)
    canvas = Image.new(
        "RGB", (SIDE * len(colours_by_title), sum(heights) + lines * LINE + MARGIN), "white"
    )
    draw, top = ImageDraw.Draw(canvas), 0
    for row, view, height in zip(rows, VIEWS, heights, strict=True):
        for index, (picture, title) in enumerate(zip(row, colours_by_title, strict=True)):
            draw.text((index * SIDE + MARGIN, top + 2), f"{title}, {view}", fill="black")
            canvas.paste(picture, (index * SIDE, top + LINE))
        top += height
    for index, (name, colour) in enumerate(legend):
        x, y = MARGIN + index % columns * 110, top + MARGIN // 2 + index // columns * LINE
        draw.rectangle((x, y + 2, x + 10, y + 12), fill=colour)
        draw.text((x + 14, y), name[:15], fill="black")
    return canvas
