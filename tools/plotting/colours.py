"""Colours of plots: the palette of lines and bars, and colour bars beside images."""

from __future__ import annotations

from typing import Any

COLOURS = ("#2f6db3", "#d1603d", "#3d9467", "#8a5fb0", "#b88a1d", "#4aa3b5", "#c2577f", "#6b6b6b")


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
