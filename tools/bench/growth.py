"""Growth of a network's cost with the image size: a column of the table, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engine.figures import load_pyplot
from tasks.engine.run_folder.atomic_writes import whole_file
from tools.cli.tables import Record
from tools.plotting.colours import COLOURS
from tools.plotting.labels import spread_heights, spread_ticks

SUFFIXES = (".png", ".pdf", ".svg")
GAP = 0.035  # between labels, relative to the height of the plot
Shape = tuple[int, ...]  # of an input, without its batch


def check_picture(path: str, shapes: Sequence[Shape]) -> None:
    """Check that a plot can be drawn, before anything is timed.

    Raises:
        ValueError: The name is not a picture's, its folder is missing, or there is one size only.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"out must end in {', '.join(SUFFIXES)}; got {path!r}")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"out={path}: the folder {Path(path).parent} is missing; create it first")
    if len(shapes) < 2:
        raise ValueError("out= plots cost over image size; pass two or more: image_size=224,448")


def format_size(shape: Shape, channels_first: bool = True) -> str:
    """Format the sides of an input's shape, such as HEIGHTxWIDTH; leading channels are omitted."""
    return "x".join(map(str, shape[1:] if channels_first else shape))


def growth_ratio(
    seconds: Sequence[float], shape: Shape, first: Sequence[float], first_shape: Shape
) -> float:
    """Return time per pixel relative to the first size, median over rounds; 1 is linear cost."""
    share = math.prod(first_shape) / math.prod(shape)
    return share * statistics.median(a / b for a, b in zip(seconds, first, strict=True))


def count_pixels(record: Record) -> int:
    """Return the number of pixels of a record's image."""
    height, width = str(record["image_size"]).split("x")
    return int(height) * int(width)


def group_series(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Group records by network, step and batch, sorted by image size."""
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=count_pixels):
        key = record["backbone"], record["step"], record["batch"]
        lines.setdefault(key, []).append(record)
    return lines


def draw_growth(records: Sequence[Record], path: str) -> None:
    """Plot milliseconds and growth over the number of pixels.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.ticker import LogLocator

    plt = load_pyplot()

    lines = group_series(records)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axis, figure_of, title in (
        (axes[0], "ms", "milliseconds per step"),
        (axes[1], "growth", "time per pixel, relative to the first size"),
    ):
        ends = []
        for number, (key, line) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            x, y = [count_pixels(point) for point in line], [point[figure_of] for point in line]
            axis.plot(x, y, marker="o", ms=5, lw=1.8, color=colour)
            ends.append((x[-1], y[-1], _series_name(key, lines), colour))
        axis.set_xscale("log")
        if figure_of == "ms":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        _label_sizes(axis, records)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("image")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if figure_of == "growth":
            axis.axhline(1, color="#a0a0a0", lw=1, ls=(0, (4, 3)), zorder=0)
            axis.set_ylim(bottom=0)
        _label_ends(axis, ends)
    for axis in axes:  # the labels have made the axes narrower
        spread_ticks(axis)
    with whole_file(Path(path)) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=130)
    plt.close(figure)


def _series_name(key: tuple[Any, ...], lines: dict[tuple[Any, ...], list[Record]]) -> str:
    """Return the backbone, with step and batch if there are several."""
    backbone, step, batch = key
    steps, batches = {series[1] for series in lines}, {series[2] for series in lines}
    more = [step] * (len(steps) > 1) + [f"batch {batch}"] * (len(batches) > 1)
    return ", ".join([backbone, *more])


def _label_sizes(axis: Any, records: Sequence[Record]) -> None:
    """Label the axis with the timed sizes, as typed."""
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    sizes = {count_pixels(record): str(record["image_size"]) for record in records}
    axis.set_xticks(list(sizes), list(sizes.values()))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(ScalarFormatter())


def _label_ends(axis: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Label the ends of lines without overlap."""
    axis.figure.canvas.draw()
    to_axis, ends = axis.transAxes.inverted(), sorted(ends, key=lambda end: end[1])
    places = [to_axis.transform(axis.transData.transform((x, y))) for x, y, _, _ in ends]
    heights = spread_heights([place[1] for place in places], GAP * 1.3, 0.97)
    for (x, y, name, colour), place, height in zip(ends, places, heights, strict=True):
        axis.annotate(
            name, (x, y), xytext=(place[0] + 0.03, height), textcoords="axes fraction",
            color=colour, fontsize=9, va="center", annotation_clip=False,
        )  # fmt: skip
