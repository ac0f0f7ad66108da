"""How the cost of whole networks grows with the map: a column, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.cli.tables import Record
from tools.plotting.labels import spread_ticks, stacked

SUFFIXES = (".png", ".pdf", ".svg")
COLOURS = ("#2f6db3", "#d1603d", "#3d9467", "#8a5fb0", "#b88a1d", "#4aa3b5", "#c2577f", "#6b6b6b")
GAP = 0.035  # between two labels, of the height of a picture


def check_picture(path: str, sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse what cannot be drawn, before anything is timed.

    Raises:
        ValueError: Not the name of a picture, no folder for it, or a single size.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"out must end in {', '.join(SUFFIXES)}; got {path!r}")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"out={path}: there is no folder {Path(path).parent}; make it first")
    if len(sizes) < 2:
        raise ValueError("out= draws cost over image sizes; give two at least: image_size=224,448")


def name_of(size: tuple[int, int]) -> str:
    """HEIGHTxWIDTH."""
    return f"{size[0]}x{size[1]}"


def growth(
    seconds: Sequence[float],
    size: tuple[int, int],
    first: Sequence[float],
    first_size: tuple[int, int],
) -> float:
    """Time per pixel over that at the first size, the median over rounds: 1 is a linear cost."""
    share = first_size[0] * first_size[1] / (size[0] * size[1])
    return share * statistics.median(a / b for a, b in zip(seconds, first, strict=True))


def pixels(record: Record) -> int:
    """Of an image."""
    height, width = str(record["image_size"]).split("x")
    return int(height) * int(width)


def series(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Records of one network, step and batch, from the smallest image to the largest."""
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=pixels):
        key = record["backbone"], record["step"], record["batch"]
        lines.setdefault(key, []).append(record)
    return lines


def draw(records: Sequence[Record], path: str) -> None:
    """Write a picture of milliseconds and of growth over the pixels of an image.

    Args:
        records: Of the benchmark, with growth.
        path: Of the picture.

    Raises:
        ValueError: It cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    lines = series(records)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axis, figure_of, title in (
        (axes[0], "ms", "milliseconds a step"),
        (axes[1], "growth", "time per pixel, over that at the first size"),
    ):
        ends = []
        for number, (key, line) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            x, y = [pixels(one) for one in line], [one[figure_of] for one in line]
            axis.plot(x, y, marker="o", ms=5, lw=1.8, color=colour)
            ends.append((x[-1], y[-1], _name(key, lines), colour))
        axis.set_xscale("log")
        if figure_of == "ms":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        _ticks(axis, records)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("image")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if figure_of == "growth":
            axis.axhline(1, color="#a0a0a0", lw=1, ls=(0, (4, 3)), zorder=0)
            axis.set_ylim(bottom=0)
        _label(axis, ends)
    for axis in axes:  # which the names have made narrower
        spread_ticks(axis)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"out={path}: the picture cannot be written ({error})") from error
    finally:
        plt.close(figure)


def _name(key: tuple[Any, ...], lines: dict[tuple[Any, ...], list[Record]]) -> str:
    """The backbone, with step and batch where there are several."""
    backbone, step, batch = key
    steps, batches = {other[1] for other in lines}, {other[2] for other in lines}
    more = [step] * (len(steps) > 1) + [f"batch {batch}"] * (len(batches) > 1)
    return ", ".join([backbone, *more])


def _ticks(axis: Any, records: Sequence[Record]) -> None:
    """The sizes that were timed, as they are typed."""
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    sizes = {pixels(one): str(one["image_size"]) for one in records}
    axis.set_xticks(list(sizes), list(sizes.values()))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(ScalarFormatter())


def _label(axis: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the names at the ends of lines, apart from each other."""
    axis.figure.canvas.draw()
    to_axis, ends = axis.transAxes.inverted(), sorted(ends, key=lambda end: end[1])
    places = [to_axis.transform(axis.transData.transform((x, y))) for x, y, _, _ in ends]
    heights = stacked([place[1] for place in places], GAP * 1.3, 0.97)
    for (x, y, name, colour), place, height in zip(ends, places, heights, strict=True):
        axis.annotate(
            name, (x, y), xytext=(place[0] + 0.03, height), textcoords="axes fraction",
            color=colour, fontsize=9, va="center", annotation_clip=False,
        )  # fmt: skip
