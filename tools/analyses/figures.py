"""Matplotlib figures and parts of figures that several analyses draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.engine.figures import load_pyplot
from tools.plotting.colours import COLOURS, colour_bar

if TYPE_CHECKING:
    from torch import Tensor

    from tools.analyses.subjects import Subject

COARSE = 5  # maps with at least this many cells per side are smoothed
Array = NDArray[Any]


def new_figure(rows: int = 1, columns: int = 1, width: float = 3.0, height: float = 3.0) -> Any:
    """Create a figure of equal panels; return it with its axes, an array (rows, columns).

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        width: Per panel, in inches.
        height: Per panel, in inches.
    """
    plt = load_pyplot()
    plt.rcParams["svg.hashsalt"] = "mixerlab"  # makes SVG files reproducible
    return plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )


def denormalise(image: Tensor, subject: Subject) -> Array:
    """Convert a normalised image (C, H, W) to RGB values between 0 and 1, (H, W, 3)."""
    if getattr(subject.data, "bands", None) is not None:
        from tasks.engine.drawing import draw_bands

        bands = image.detach().float().cpu().permute(1, 2, 0).numpy()
        return np.asarray(draw_bands(bands)) / 255
    mean, std = (np.array(part) for part in subject.normalisation)
    values = image.detach().float().cpu().permute(1, 2, 0).numpy() * std + mean
    return values.clip(0, 1)


def enlarge_map(map_: Tensor, size: tuple[int, int]) -> Array:
    """Enlarge a map (h, w) to the size of an image, bilinearly."""
    import torch.nn.functional as F

    grown = F.interpolate(map_[None, None].float(), size, mode="bilinear", align_corners=False)
    return grown[0, 0].cpu().numpy()


def resize_map(map_: Tensor, size: tuple[int, int]) -> Array:
    """Enlarge a map (h, w) to the size of an image; coarse ones keep the borders of their cells."""
    import torch.nn.functional as F

    if min(map_.shape) >= COARSE:
        return enlarge_map(map_, size)
    grown = F.interpolate(map_[None, None].float(), size, mode="nearest-exact")
    return grown[0, 0].cpu().numpy()


def draw_overlay(
    axis: Any, picture: Array, heat: Array, greatest: float, share: float = 0.5
) -> None:
    """Draw a heat map over an image; ``greatest`` gets the hottest colour."""
    axis.imshow(overlay(picture, heat, greatest, share))
    hide_axes(axis)


def overlay(picture: Array, heat: Array, greatest: float, share: float = 0.5) -> Array:
    """Return an image (H, W, 3) from 0 to 1 with a heat map over it."""
    import matplotlib as mpl

    colours = mpl.colormaps["jet"](np.clip(heat / greatest if greatest > 0 else heat, 0, 1))
    return np.asarray((1 - share) * picture + share * colours[..., :3])


def hide_axes(axis: Any) -> None:
    """Remove ticks and frame."""
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def curves(
    lines: Mapping[str, Sequence[float]], title: str, ylabel: str, xlabel: str = "block"
) -> Any:
    """Draw one line per network over its blocks, numbered from 1.

    Networks of different depth share the axis.
    """
    figure, axes = new_figure(width=7.0, height=4.0)
    axis = axes[0, 0]
    for index, (name, values) in enumerate(lines.items()):
        axis.plot(range(1, len(values) + 1), values, marker="o", markersize=4, label=name,
                  color=COLOURS[index % len(COLOURS)])  # fmt: skip
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.xaxis.get_major_locator().set_params(integer=True)
    finish(axis, len(lines) > 1)
    return figure


def finish(axis: Any, legend: bool = True) -> None:
    """Add a light grid and a legend, and remove the upper frame."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        axis.legend(fontsize=8, frameon=False)


LONG = 3  # ratio of the sides of a map from which it is stretched to its panel
Panels = Mapping[str, Sequence[tuple[str, Any]]]  # name of a row -> titles and maps (h, w)


def panel_grid(
    networks: Mapping[str, Panels], *, colours: str = "turbo", symmetric: bool = False
) -> Any:
    """Draw maps in one figure: networks side by side, their layers below each other.

    Row i of all networks shares one colour scale, drawn at the end of the row, for comparison.

    Args:
        networks: By label.
        colours: Matplotlib's name of a colour map.
        symmetric: The colour scale is symmetric around 0.
    """
    rows = max(map(len, networks.values()))
    widths = [max(map(len, panels.values())) for panels in networks.values()]
    scales = [_scale(networks, row, symmetric) for row in range(rows)]
    figure, axes = new_figure(rows, sum(widths), 1.5, 1.7)
    for axis in axes.flat:
        hide_axes(axis)
    start, images = 0, {}
    for (label, panels), width in zip(networks.items(), widths, strict=True):
        for row, (name, maps) in enumerate(panels.items()):
            axes[row, start].set_ylabel(wrap_text(name, 26), fontsize=7)
            for axis, (title, map_) in zip(axes[row, start : start + width], maps, strict=False):
                low, high = scales[row]
                values = _array(map_)
                is_long = max(values.shape) > LONG * min(values.shape)
                images[row] = axis.imshow(
                    values, cmap=colours, vmin=low, vmax=high,
                    aspect="auto" if is_long else "equal",
                )  # fmt: skip
                axis.set_title(title, fontsize=7)
        above = axes[0, start]
        above.set_title(f"{wrap_text(label, 24)}\n{above.get_title()}", fontsize=7)
        start += width
    for row, image in images.items():
        colour_bar(figure, image, list(axes[row]))
    return figure


def _scale(networks: Mapping[str, Panels], row: int, symmetric: bool) -> tuple[float, float]:
    values = [
        _array(map_)
        for panels in networks.values()
        if row < len(panels)
        for _, map_ in list(panels.values())[row]
    ]
    low, high = (min(float(np.nanmin(v)) for v in values), max(float(np.nanmax(v)) for v in values))
    reach = max(abs(low), abs(high))
    return (-reach, reach) if symmetric else (low, high)


def _array(map_: Any) -> Array:
    return np.asarray(map_.detach().cpu().float() if hasattr(map_, "detach") else map_, dtype=float)


def select_evenly(names: Sequence[str], count: int) -> list[str]:
    """Choose ``count`` of the names, evenly spaced, including the first and the last."""
    if count >= len(names) or count < 2:
        return list(names)[: max(count, 1)] if count < len(names) else list(names)
    return [names[round(index * (len(names) - 1) / (count - 1))] for index in range(count)]


def wrap_text(text: str, width: int) -> str:
    """Wrap a text to lines of ``width`` characters, also at dots."""
    import textwrap

    spaced = text.replace(".", ". ").replace("_", "_ ")
    lines = textwrap.wrap(spaced, width, break_long_words=True)
    return "\n".join(lines).replace(". ", ".").replace("_ ", "_")
