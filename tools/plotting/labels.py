"""Places the texts of a picture so that they do not overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

LONGEST = 24  # characters of a name on an axis
TURNED = 60  # degrees of names that do not fit side by side
LINE = 1.25  # height of a line over its font size


def name_ticks(axis: Any, names: Sequence[str], *, vertical: bool = False, size: float = 7) -> None:
    """Name the places 0, 1, ... of an axis; of too many names only every second, third, ... stands.

    Args:
        axis: Matplotlib's, in a figure of its final size.
        names: One for each place; long ones are cut.
        vertical: Name the vertical axis.
        size: Of the letters, in points.
    """
    axis.figure.draw_without_rendering()  # lays the axes out
    box = axis.get_position()
    inches = axis.figure.get_size_inches()
    points = 72 * (inches[1] * box.height if vertical else inches[0] * box.width)
    needed = LINE * size / (1 if vertical else math.sin(math.radians(TURNED)))
    every = max(1, math.ceil(needed * len(names) / points))
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
            places, texts, fontsize=size, rotation=TURNED, ha="right", rotation_mode="anchor"
        )


def cut(name: str, longest: int = LONGEST) -> str:
    """Return a name of at most so many characters, of which its end may be an ellipsis."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def extent(text: Any) -> Any:
    """Return the box of a text in pixels; of an annotation without its arrow."""
    from matplotlib.text import Annotation, Text

    if isinstance(text, Annotation):
        canvas: Any = text.figure.canvas
        text.update_positions(canvas.get_renderer())
    return Text.get_window_extent(text)


def overlap(texts: Sequence[Any]) -> bool:
    """Return True if two texts of a drawn figure overlap."""
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [extent(text) for text in shown]
    return any(
        one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[place + 1 :]
    )


def spread_ticks(axis: Any) -> None:
    """Turn the labels of a horizontal axis that overlap; of too many only those apart stay."""
    axis.figure.draw_without_rendering()
    if not overlap(axis.get_xticklabels()):
        return
    needed = 0.0
    for label in axis.get_xticklabels():
        label.set(rotation=TURNED, ha="right", rotation_mode="anchor")
        needed = LINE * label.get_fontsize() / math.sin(math.radians(TURNED))
    dots = needed * axis.figure.dpi / 72
    last = -math.inf
    for place, label in sorted(zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)):
        at = axis.transData.transform((place, axis.get_ylim()[0]))[0]
        label.set_visible(at - last >= dots)
        last = at if label.get_visible() else last


def turn_bar_labels(axis: Any, texts: Sequence[Any]) -> None:
    """Turn the numbers above an axis' bars where one is wider than its bar's place."""
    axis.figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
    if any(one.x1 > other.x0 for one, other in itertools.pairwise(boxes)):
        axis.margins(y=0.3)  # so high may a number stand
        for text in texts:
            text.set(rotation=90, va="bottom")


def stacked(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move heights apart, in their order, by as little as leaves a gap between each two.

    Args:
        heights: Rising.
        gap: Between two.
        top: What the last shall not exceed, where there is room for all below it.
    """
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    limit = top
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], limit)
        limit = moved[place] - gap
    return moved
