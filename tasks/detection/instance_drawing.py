"""Pictures of boxes and masks with captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tasks.engine.drawing import Box, Colour, enlarge, load_font, overlap, shorten, tint

PADDING = 2  # between a caption and the ends of its area


def draw_instances(
    picture: Image.Image,
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    captions: Sequence[str],
    colours: Sequence[Colour],
    masks: NDArray[np.bool_] | None = None,
) -> Image.Image:
    """Draw boxes (x1, y1, x2, y2) with captions, and masks (N, H, W) as a tint.

    Args:
        picture: The photograph.
        boxes: One per instance, in its pixels.
        labels: Their classes.
        captions: Their captions; empty for none.
        colours: Colour per class.
        masks: Their masks.
    """
    box_colours = [tuple(colours[label]) for label in labels]
    canvas, factor = enlarge(picture)
    if masks is not None:
        canvas = tint(canvas, list(masks), box_colours)
    draw, font = ImageDraw.Draw(canvas), load_font(13)
    scaled = []
    for box, colour in zip(boxes, box_colours, strict=True):
        x1, y1, x2, y2 = (float(value) * factor for value in box)
        scaled.append((x1, y1, max(x1, x2), max(y1, y2)))
        draw.rectangle(scaled[-1], outline=colour, width=2)
    areas: list[Box] = []
    for edges, colour, caption in zip(scaled, box_colours, captions, strict=True):
        caption = shorten(caption, canvas.width - 2 * PADDING, font)
        size = (font.getlength(caption) + 2 * PADDING, 15.0)
        area = _free_place(edges, size, canvas.size, areas)
        if area is None:  # the colour of the box still shows its class
            continue
        areas.append(area)
        if caption:
            draw.rectangle(area, fill=colour)
            draw.text((area[0] + PADDING, area[1]), caption, fill="white", font=font)
    return canvas


def _free_place(
    box: Box, size: tuple[float, float], canvas: tuple[int, int], blockers: Sequence[Box]
) -> Box | None:
    """Find a free area for a caption: above its box, below or inside it, or in the nearest line.

    The area lies inside the picture and clear of other captions; None if the picture is full.
    """
    (x1, y1, x2, y2), (width, height) = box, size
    x_start = min(max(0.0, x1), max(0.0, canvas[0] - width))
    right = min(max(0.0, x2 - width), max(0.0, canvas[0] - width))
    highest = max(0.0, canvas[1] - height)
    lines = [place * (height + 1) for place in range(int(highest // (height + 1)) + 1)]
    lines.sort(key=lambda y: abs(y - y1))
    places = [
        (x, min(max(0.0, y), highest))
        for y in (y1 - height, y2 + 1, y1, y2 - height, *lines)
        for x in (x_start, right)
    ]
    areas = ((x, y, x + width, y + height) for x, y in places)
    spots = (area for area in areas if not any(overlap(area, blocker) for blocker in blockers))
    return next(spots, None)
