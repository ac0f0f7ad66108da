"""Plot a metric over a cost or a setting, with papers' points and the Pareto front."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.family import Direction, families
from tasks.engine.figures import load_pyplot
from tasks.engine.run_folder.atomic_writes import whole_file
from tools.comparing.paper_figures import points
from tools.comparing.table import Row, metric_direction, pareto, setting
from tools.plotting.colours import COLOURS
from tools.plotting.labels import text_extent

AXES = {
    "params": "parameters in M",
    "macs": "multiply-adds of the backbone in G",
    "latency": "milliseconds for one image on this CPU",
}
REPORTED = {"params": "params", "macs": "flops"}
LOGARITHMIC_FROM = 3.0  # ratio of the largest to the smallest cost
FEW = 8  # values of a setting that are all written below the axis
ROUNDS = 15
WIDE, LINE = 105, 0.14  # characters per line below the axes, and its height in inches
# Offsets of a label from its point, in points, the nearest first.
NEAR = [
    (x * reach, y * reach)
    for reach in (1.0, 1.8, 2.8)
    for x, y in ((8, 5), (8, -5), (-8, 5), (-8, -5), (0, 9), (0, -9))
]
FAR = [
    (radius * math.cos(math.tau * step / 24), radius * math.sin(math.tau * step / 24))
    for radius in range(30, 330, 15)
    for step in range(24)
]
PLACES = NEAR + FAR


def plot(
    rows: Sequence[Row],
    metric: str,
    cost: str,
    path: Path,
    *,
    heading: str = "",
    footer: Sequence[str] = (),
) -> list[str]:
    """Write the plot.

    Args:
        rows: Rows of one evaluation.
        metric: On the vertical axis.
        cost: A key of ``AXES``, or the dotted name of a setting that the runs differ in.
        path: The PNG to write.
        heading: Difference of this evaluation from those of other plots.
        footer: Lines below the axes: rows on equal terms, and other differences.

    Returns:
        Notes to print.

    Raises:
        ValueError: The file cannot be written, or none of the networks can be built for timing.
    """
    plt = load_pyplot()

    if cost not in AXES:
        return plot_setting(rows, metric, cost, path, heading=heading, footer=footer)
    notes: list[str] = []
    costs = compute_costs([row for row in rows if metric in row.mean], cost, notes)
    rows = [row for row, _ in costs]
    ours = [(x, row.mean[metric]) for row, x in costs]
    reported = _reported(rows, metric, cost)
    lines = _wrap_lines(footer)
    figure, axis = plt.subplots(figsize=(7.5, 5 + LINE * len(lines)), layout="constrained")
    _draw_rows(axis, rows, ours, metric)
    if reported:
        axis.scatter([x for _, x, _ in reported], [y for _, _, y in reported], s=34, marker="D",
                     facecolor="white", edgecolor="#555555", linewidth=1.1, zorder=3,
                     label="papers")  # fmt: skip
    title = f"{rows[0].first.task}: {metric} over {cost}"
    _name_axes(axis, title, AXES[cost], _title(rows, metric), heading, lines)
    _set_scale(axis, [x for x, _ in ours] + [x for _, x, _ in reported])
    axis.margins(x=0.14, y=0.12)
    _draw_front(axis, ours, metric_direction(rows[0].first.task, metric))
    _finish(axis)
    labels = [(_full_name(row), x, y) for row, (x, y) in zip(rows, ours, strict=True)]
    nameless = _place_labels(figure, axis, labels, reported)
    if nameless:
        notes.append(
            f"the plot leaves out {len(nameless)} of {len(labels) + len(reported)} names: "
            f"{', '.join(nameless[:4])}{', ...' * (len(nameless) > 4)}"
        )
    _save(figure, path)
    if cost == "latency":
        busy = f"{os.getloadavg()[0]:.1f} processes" if hasattr(os, "getloadavg") else "others"
        return [*notes, f"timed with {torch_threads()} threads while {busy} wanted the processor"]
    for name in dict.fromkeys(_backbone(row) for row in rows if row.first.host is None):
        notes.append(f"backbone {name} is not in this checkout, so papers' points are missing")
    if not reported:
        notes.append("these runs' data and costs are in none of the papers, so the plot "
                     "only has points of runs")  # fmt: skip
    return notes


def plot_setting(
    rows: Sequence[Row],
    metric: str,
    key: str,
    path: Path,
    *,
    heading: str = "",
    footer: Sequence[str] = (),
) -> list[str]:
    """Write a plot of a metric over the values of a setting, one line per network.

    Args:
        rows: Rows of one evaluation.
        metric: On the vertical axis.
        key: Dotted name of the setting.
        path: The PNG to write.
        heading: As for ``plot``.
        footer: As for ``plot``.

    Returns:
        Notes to print.

    Raises:
        ValueError: The file cannot be written.
    """
    plt = load_pyplot()

    rows = [row for row in rows if metric in row.mean]
    values = [setting(row.first, key)[1] for row in rows]
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    names = list(dict.fromkeys("null" if value is None else str(value) for value in values))
    places = values if numeric else [names.index("null" if v is None else str(v)) for v in values]
    series: dict[str, list[tuple[float, Row]]] = {}
    for place, row in zip(places, rows, strict=True):
        series.setdefault(_without_setting(row, key), []).append((float(place), row))
    lines = _wrap_lines(footer)
    figure, axis = plt.subplots(figsize=(7.5, 5 + LINE * len(lines)), layout="constrained")
    for number, (name, points_) in enumerate(series.items()):
        points_.sort(key=lambda point: point[0])
        axis.errorbar(
            [place for place, _ in points_], [row.mean[metric] for _, row in points_],
            yerr=[row.deviation[metric] or 0 for _, row in points_], fmt="o-" if numeric else "o",
            ms=6, lw=1.2, capsize=3, color=COLOURS[number % len(COLOURS)], label=name,
        )  # fmt: skip
    title = f"{rows[0].first.task}: {metric} over {key}"
    _name_axes(axis, title, key, _title(rows, metric), heading, lines)
    if numeric:
        _set_scale(axis, [float(place) for place in places])
        if len(set(places)) <= FEW:
            ticks = sorted(set(places))
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    else:
        axis.set_xticks(range(len(names)), names, rotation=30 if len(names) > 4 else 0, ha="right")
    _finish(axis)
    _save(figure, path)
    return []


def _without_setting(row: Row, key: str) -> str:
    """Name a row by all but one setting, or by its full name if that leaves an empty text."""
    value = setting(row.first, key)[1]
    words = [word for word in row.label if word != ("-" if value is None else str(value))]
    words += [word for word in row.settings.split() if not word.startswith(f"{key}=")]
    return " ".join(words) or row.name


def _wrap_lines(footer: Sequence[str]) -> list[str]:
    return [part for line in footer for part in textwrap.wrap(line, WIDE, subsequent_indent="    ")]


def _title(rows: Sequence[Row], metric: str) -> str:
    """Return the label of a metric's axis, as the family of the rows names it."""
    family = families().get(rows[0].first.task)
    return (family.metric(metric).title if family else "") or metric


def _name_axes(
    axis: Any, title: str, across: str, metric: str, heading: str, lines: Sequence[str]
) -> None:
    axis.set_xlabel("\n".join([across, *lines]))
    if lines:
        axis.xaxis.label.set(fontsize=8, ha="left", x=0)
    axis.set_ylabel(metric)
    titles = [title, *textwrap.wrap(heading, WIDE)]
    axis.set_title("\n".join(titles), loc="left", fontsize=11 if len(titles) == 1 else 9)


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.25, which="both", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="best")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            figure.savefig(file, format=path.suffix[1:] or "png", dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"the plot cannot be written to {path} ({error})") from error
    finally:
        plt.close(figure)


def _full_name(row: Row) -> str:
    """Return a row's name, with its letter of equal terms."""
    return f"{row.name} ({row.terms})" if row.terms else row.name


def compute_costs(rows: Sequence[Row], cost: str, notes: list[str]) -> list[tuple[Row, float]]:
    """Return the rows with their costs; latencies are measured if the network can be built.

    Args:
        rows: Rows of one task.
        cost: A key of ``AXES``.
        notes: Gets a line for each row that is left out.
    """
    if cost == "latency":
        return _latencies(rows, notes)
    figure, unit = {"params": ("parameters", 1e6), "macs": ("backbone_macs", 1e9)}[cost]
    return [(row, row.average(figure) / unit) for row in rows]


def torch_threads() -> int:
    """Return the number of torch's threads."""
    import torch

    return torch.get_num_threads()


def _latencies(rows: Sequence[Row], notes: list[str]) -> list[tuple[Row, float]]:
    """Measure the latency in ms of each row's backbone with a classifier, interleaved."""
    import torch

    from tools.bench import timed_networks as networks
    from tools.bench.timing import interleave, make_step
    from tools.cli.typed_network import network_label

    steps: dict[str, Any] = {}
    keys = []
    for row in rows:
        network = (_backbone(row), _options(row))
        size = tuple(int(side) for side in row.first.summary["macs_at"])
        key = f"{network_label(network)} {size}"
        if key not in steps:
            try:
                shape = _input_shape(_backbone(row), size)
                model = networks.build_network(network, {"device": "cpu", "compile": "false"})
            except ValueError as error:  # from another checkout, or its files are gone
                reason = str(error).partition(";")[0]
                notes.append(f"{row.name} is left out of the plot, because timing failed: {reason}")
                continue
            steps[key] = make_step(model, torch.randn(1, *shape), "forward", torch.float32)
        keys.append((row, key))
    if not keys:
        raise ValueError(
            "plot=latency needs the networks, but this checkout can build none of them; pass "
            "plot=params or plot=macs, which the runs have recorded"
        )
    seconds = interleave(list(steps.values()), ROUNDS, "cpu")
    latencies = dict(zip(steps, (1e3 * statistics.median(times) for times in seconds), strict=True))
    return [(row, latencies[key]) for row, key in keys]


def _input_shape(name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a backbone's input by ``macs_at`` of a run, which omits channels."""
    from tools.bench.timed_networks import input_shapes, timed_family

    if not timed_family(name).channels_first:
        return size
    return (input_shapes([name], "")[0][0], *size)


def _backbone(row: Row) -> str:
    return str(row.first.config["backbone.name"])


def _options(row: Row) -> dict[str, Any]:
    """Return the backbone options of a row that may affect its cost."""
    nested: dict[str, Any] = {}
    for key, value in row.first.config.items():
        group, _, option = key.partition(".")
        if group != "backbone" or option in ("name", "pretrained", "dense", "drop_path_rate"):
            continue
        *parents, last = option.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def _reported(rows: Sequence[Row], metric: str, cost: str) -> list[tuple[str, float, float]]:
    """Return the papers' points for these rows; costs of whole detectors do not fit backbones."""
    family = families().get(rows[0].first.task)
    published = family and family.published
    if cost == "latency" or not published or (cost == "macs" and published.whole_cost):
        return []
    return points([run for row in rows for run in row.runs], metric, REPORTED[cost])


def _draw_front(axis: Any, ours: Sequence[tuple[float, float]], direction: Direction) -> None:
    """Draw the Pareto front: steps from each best point to the next, and to the edge."""
    front = [ours[index] for index in pareto(ours, direction)]
    axis.autoscale_view()
    start, right = axis.get_xlim()
    axis.set_xlim(start, right)
    x, y = zip(*front, (right, front[-1][1]), strict=True)
    axis.plot(x, y, drawstyle="steps-post", color="#a0a0a0", lw=1.2, ls=(0, (4, 3)), zorder=1,
              label="best for its cost (Pareto)")  # fmt: skip


def _draw_rows(
    axis: Any, rows: Sequence[Row], ours: Sequence[tuple[float, float]], metric: str
) -> None:
    """Draw one point per row with its deviation, in the colour of its host.

    A backbone that this checkout lacks gets its own colour.
    """
    hosts = [row.first.host or _backbone(row) for row in rows]
    colours: Mapping[str, str] = {
        host: COLOURS[number % len(COLOURS)] for number, host in enumerate(dict.fromkeys(hosts))
    }
    labels: set[str] = set()
    for row, host, (x, y) in zip(rows, hosts, ours, strict=True):
        axis.errorbar(x, y, yerr=row.deviation[metric], fmt="o", ms=7, color=colours[host],
                      mec="white", mew=0.8, ecolor=colours[host], elinewidth=1.2, capsize=3,
                      zorder=4, label=None if host in labels else host)  # fmt: skip
        labels.add(host)


def _set_scale(axis: Any, costs: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    if min(costs) <= 0 or max(costs) / min(costs) < LOGARITHMIC_FROM:
        return
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _place_labels(
    figure: Any,
    axis: Any,
    ours: Sequence[tuple[str, float, float]],
    reported: Sequence[tuple[str, float, float]],
) -> list[str]:
    """Place each name where it overlaps no point or name, with a line if it is far from its point.

    Returns:
        Names without such a place, which are left out.
    """
    from matplotlib.transforms import Bbox

    figure.canvas.draw()  # fixes the positions of the axes
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    to_pixels, frame = axis.transData.transform, axis.get_window_extent(renderer)
    dots = [to_pixels((x, y)) for _, x, y in (*ours, *reported)]
    points_taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in dots]
    legend = axis.get_legend()
    areas = [legend.get_window_extent(renderer)] if legend else []
    marks = [("#222222", 8.5, *item) for item in ours]
    marks += [("#666666", 6.5, *item) for item in reported]
    left_out = []
    for colour, size, name, x, y in marks:
        trial = _label(axis, name, (x, y), (0, 0), colour, size)
        box = text_extent(trial)
        trial.remove()
        obstacles = np.array([extent.extents for extent in (*areas, *points_taken)])
        for place in PLACES:
            corner = _corner(to_pixels((x, y)), place, box, figure.dpi / 72)
            area = Bbox.from_bounds(*corner, box.width, box.height).padded(2.5)
            inside = frame.x0 <= area.x0 and area.x1 <= frame.x1
            inside = inside and frame.y0 <= area.y0 and area.y1 <= frame.y1
            is_clear = (area.x0 > obstacles[:, 2]) | (area.x1 < obstacles[:, 0])
            is_clear |= (area.y0 > obstacles[:, 3]) | (area.y1 < obstacles[:, 1])
            if inside and is_clear.all():
                areas.append(area)
                _label(axis, name, (x, y), place, colour, size)
                break
        else:
            left_out.append(name)
    return left_out


def _corner(
    point: tuple[float, float], place: tuple[float, float], box: Any, scale: float
) -> tuple[float, float]:
    """Return the lower left corner, in pixels, of a label at an offset from its point."""
    x, y = (start + scale * move for start, move in zip(point, place, strict=True))
    start = x if place[0] > 0 else x - box.width if place[0] < 0 else x - box.width / 2
    return start, y if place[1] > 0 else y - box.height


def _label(
    axis: Any,
    name: str,
    point: tuple[float, float],
    place: tuple[float, float],
    colour: str,
    size: float,
) -> Any:
    x, y = place
    far = abs(x) + abs(y) > 14
    return axis.annotate(
        name, point, xytext=place, textcoords="offset points", fontsize=size, color=colour,
        ha="left" if x > 0 else "right" if x < 0 else "center", va="bottom" if y > 0 else "top",
        arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#aaaaaa"} if far else None,
        zorder=5,
    )  # fmt: skip
