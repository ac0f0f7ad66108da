"""Colour bars beside images of numbers."""

from __future__ import annotations

from typing import Any


def colour_bar(figure: Any, image: Any, beside: Any, label: str = "", size: float = 6) -> Any:
    """Draw the colour scale of an image beside one or several axes.

    Args:
        figure: With a constrained layout.
        image: From ``imshow``.
        beside: Axes, or an array or list of axes.
        label: Name of the quantity.
        size: Font size in points.
    """
    bar = figure.colorbar(image, ax=beside, shrink=0.85, pad=0.02, aspect=24)
    bar.locator = _few_ticks()
    bar.update_ticks()
    bar.ax.tick_params(labelsize=size, length=2)
    bar.outline.set_linewidth(0.4)
    if label:
        bar.set_label(label, fontsize=size + 1)
    return bar


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)
