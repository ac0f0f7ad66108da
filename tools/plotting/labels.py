"""Place the labels of a plot without overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

MAX_LENGTH = 24  # characters per name on an axis
ANGLE = 60  # degrees of rotation for names too long to stand side by side
LINE_HEIGHT = 1.25  # relative to the font size


def name_ticks(axis: Any, names: Sequence[str], *, vertical: bool = False, size: float = 7) -> None:
    """Label the ticks 0, 1, ... of an axis; if there are too many, every second, third, ... one.

    Args:
        axis: Matplotlib's, in a figure of its final size.
        names: One per tick; long ones are cut.
        vertical: Label the vertical axis.
        size: Font size in points.
    """
    axis.figure.draw_without_rendering()  # computes the layout
    box = axis.get_position()
    inches = axis.figure.get_size_inches()
    points = 72 * (inches[1] * box.height if vertical else inches[0] * box.width)
    space = LINE_HEIGHT * size / (1 if vertical else math.sin(math.radians(ANGLE)))
    every = max(1, math.ceil(space * len(names) / points))
    places = range(0, len(names), every)
    texts = [cut(names[place]) for place in places]
    if vertical:
        axis.set_yticks(places, texts, fontsize=size)
        return
    widest = (1.5 + max(map(len, texts), default=0)) * 0.65 * size  # with a gap
    if every == 1 and widest * len(names) < points:
        axis.set_xticks(places, texts, fontsize=size)
    else:
        axis.set_xticks(
            places, texts, fontsize=size, rotation=ANGLE, ha="right", rotation_mode="anchor"
        )


def cut(name: str, longest: int = MAX_LENGTH) -> str:
    """Cut a name to ``longest`` characters, the last one an ellipsis."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def text_extent(text: Any) -> Any:
    """Return the box of a text in pixels; for an annotation, without its arrow."""
    from matplotlib.text import Annotation, Text

    if isinstance(text, Annotation):
        canvas: Any = text.figure.canvas
        text.update_positions(canvas.get_renderer())
    return Text.get_window_extent(text)


def texts_overlap(texts: Sequence[Any]) -> bool:
    """Return True if two visible texts of a drawn figure overlap."""
    labels = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [text_extent(text) for text in labels]
    return any(box.overlaps(peer) for place, box in enumerate(boxes) for peer in boxes[place + 1 :])


def spread_ticks(axis: Any) -> None:
    """Rotate the labels of a horizontal axis if they overlap, and hide those that still do."""
    axis.figure.draw_without_rendering()
    if not texts_overlap(axis.get_xticklabels()):
        return
    space = 0.0
    for label in axis.get_xticklabels():
        label.set(rotation=ANGLE, ha="right", rotation_mode="anchor")
        space = LINE_HEIGHT * label.get_fontsize() / math.sin(math.radians(ANGLE))
    dots = space * axis.figure.dpi / 72
    last = -math.inf
    for place, label in sorted(zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)):
        at = axis.transData.transform((place, axis.get_ylim()[0]))[0]
        label.set_visible(at - last >= dots)
        last = at if label.get_visible() else last


def turn_bar_labels(axis: Any, texts: Sequence[Any]) -> None:
    """Rotate the numbers above bars if one is wider than its bar."""
    axis.figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
    if any(box.x1 > peer.x0 for box, peer in itertools.pairwise(boxes)):
        axis.margins(y=0.3)  # room for the rotated numbers
        for text in texts:
            text.set(rotation=90, va="bottom")


def spread_heights(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move heights apart by as little as leaves ``gap`` between neighbours, keeping their order.

    Args:
        heights: In ascending order.
        gap: Between neighbours.
        top: Upper limit of the last height, if there is room below it.
    """
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    limit = top
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], limit)
        limit = moved[place] - gap
    return moved
