"""Places the texts of a picture so that they do not overlap."""

from __future__ import annotations

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
    widest = max(map(len, texts), default=0) * 0.6 * size
    if every == 1 and widest * len(names) < points:
        axis.set_xticks(places, texts, fontsize=size)
    else:
        axis.set_xticks(
            places, texts, fontsize=size, rotation=TURNED, ha="right", rotation_mode="anchor"
        )


def cut(name: str, longest: int = LONGEST) -> str:
    """Return a name of at most so many characters, of which its end may be an ellipsis."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def overlap(texts: Sequence[Any]) -> bool:
    """Return True if two texts of a drawn figure overlap."""
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [text.get_window_extent() for text in shown]
    return any(
        one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[place + 1 :]
    )
