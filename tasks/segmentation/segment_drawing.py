"""Pictures and files of label maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from tasks.engine.drawing import Box, Colour, enlarge, load_font, overlap, shorten, tint

LEAST = 64  # pixels allowed for the name of a narrow segment


def draw_segments(
    picture: Image.Image,
    labels: NDArray[np.integer],
    names: Sequence[str],
    colours: Sequence[Colour],
    *,
    background: str | None = None,
) -> Image.Image:
    """Tint every pixel by its class; ignored pixels and ``background`` stay unchanged.

    Args:
        picture: The photograph.
        labels: (H, W), classes of its pixels.
        names: Name per class.
        colours: Colour per class.
        background: Name of the class that stays unchanged.
    """
    canvas, factor = enlarge(picture)
    present = [int(label) for label in np.unique(labels) if label < len(names)]
    present = [label for label in present if names[label] != background]
    canvas = tint(
        canvas, [labels == label for label in present], [colours[label] for label in present]
    )
    draw, font = ImageDraw.Draw(canvas), load_font(15)
    areas: list[Box] = []
    for label in present:
        row, column, width = inmost(labels == label)
        name = shorten(names[label], min(max(width * factor, LEAST), canvas.width) - 8, font)
        half = font.getlength(name) / 2 + 2
        x = min(max((column + 0.5) * factor, half), canvas.width - half)
        y = min(max((row + 0.5) * factor, 10), canvas.height - 10)
        for line in (0, 20, -20, 40, -40):  # offsets from the middle, where another name may be
            area = (x - half, y + line - 9, x + half, y + line + 9)
            inside = not line or (area[1] >= 0 and area[3] <= canvas.height)
            if inside and not any(overlap(area, caption_area) for caption_area in areas):
                areas.append(area)
                draw.text((x, y + line), name, fill="white", font=font, anchor="mm",
                          stroke_width=2, stroke_fill="black")  # fmt: skip
                break
    return canvas


def inmost(mask: NDArray[np.bool_]) -> tuple[int, int, int]:
    """Return the row and column deepest inside a mask's largest part, and its width there."""
    parts, count = ndimage.label(mask)
    if count > 1:
        sizes = np.bincount(parts.ravel())
        mask = parts == 1 + int(sizes[1:].argmax())
    # The border of the picture counts as an edge.
    depth = ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    row, column = (int(i) for i in np.unravel_index(int(depth.argmax()), depth.shape))
    outside = np.flatnonzero(~mask[row])
    start = outside[outside < column].max(initial=-1)
    right = outside[outside > column].min(initial=mask.shape[1])
    return row, column, int(right - start - 1)


def label_map(
    labels: NDArray[np.uint8], values: Sequence[int], colours: Sequence[Colour]
) -> Image.Image:
    """Convert labels (H, W) to a palette picture of ``values[label]`` in the classes' colours."""
    picture = Image.fromarray(np.asarray(values, dtype=np.uint8)[labels])
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[list(values)] = np.asarray(colours, dtype=np.uint8)
    picture.putpalette(palette.flatten().tolist())
    return picture
