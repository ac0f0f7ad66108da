"""curves.png of a run: its losses on the left, its validation metrics on the right."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.engine.figures import load_pyplot
from tasks.engine.run_folder.atomic_writes import write_whole
from tools.plotting.labels import name_ticks, turn_bar_labels

LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "x")
MOST_INSIDE = 6  # curves that a legend among them may have
FEW = 40  # points up to which each is marked
LOSSES = ("train/loss", "val/loss")
WIDEST = 15  # points of a running mean, which a short curve has fewer of


def plot_curves(folder: Path, rows: Sequence[Mapping[str, Any]], why_no_loss: str = "") -> None:
    """Draw curves.png out of the rows of metrics.csv; a failed write leaves the one before.

    Validation metrics are drawn unchanged. A long training loss is drawn pale under its running
    mean, with the number of averaged points in the legend. Curves on top of each other differ in
    width, dashes and markers. A metric with a single value is a bar.

    Args:
        folder: Where to.
        rows: Each with ``step`` and some of ``train/*`` and ``val/*``.
        why_no_loss: Reason why validation lacks a loss, shown in place of its curve.
    """
    plt = load_pyplot()

    names = sorted({key for row in rows for key in row})
    losses = [n for n in names if (n.startswith("train/") and "loss" in n) or n == "val/loss"]
    metrics = [n for n in names if n.startswith("val/") and n != "val/loss"]
    # The only loss of a task is its sum, too, and drawn once.
    sums = _points(rows, "train/loss")
    losses = [n for n in losses if n in LOSSES or _points(rows, n) != sums]
    losses.sort(key=lambda name: (name not in LOSSES, name))
    figure, (loss_axis, metric_axis) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    full_names = {name: name for name in LOSSES}
    labels = {name: full_names.get(name, _last(name)) for name in losses}
    means = {labels[name] for name in losses if name.startswith("train/")}
    _draw(loss_axis, {labels[name]: _points(rows, name) for name in losses}, means)
    _draw(metric_axis, {_last(name): _points(rows, name) for name in metrics})
    loss_axis.set(title="loss")
    metric_axis.set(title="validation")
    if why_no_loss:
        text = textwrap.fill(f"no loss of validation: {why_no_loss}", 60)
        loss_axis.text(
            0.5, -0.2, text, transform=loss_axis.transAxes, ha="center", va="top", fontsize=8
        )
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    plt.close(figure)
    write_whole(folder / "curves.png", content.getvalue())


def _draw(
    axis: Any, curves: Mapping[str, list[tuple[float, float]]], means: Collection[str] = ()
) -> None:
    """Draw curves over steps, some with running means; bars where there is one point of each."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if not curves:
        axis.set(xlabel="step")
        return
    if max(map(len, curves.values())) == 1:
        heights = [points[0][1] for points in curves.values()]
        bars = axis.bar(
            range(len(heights)), heights, color=[f"C{i % 10}" for i in range(len(heights))]
        )
        numbers = axis.bar_label(
            bars, labels=[f"{height:.4g}" for height in heights], fontsize=8, padding=1
        )
        axis.margins(y=0.12)
        name_ticks(axis, list(curves), size=8)
        turn_bar_labels(axis, numbers)
        axis.set(xlabel=f"after step {next(iter(curves.values()))[0][0]:.0f}")
        return
    for index, (name, points) in enumerate(curves.items()):
        steps, values = zip(*points, strict=True)
        line, marker = LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
        style = {
            "color": f"C{index % 10}", "linestyle": line, "lw": max(1.0, 3 - 0.5 * index),
            "marker": marker if len(points) < FEW else None, "markersize": max(3, 7 - index),
            "markerfacecolor": "none",
        }  # fmt: skip
        window = min(WIDEST, len(values) // 8) if name in means else 1
        if window < 2:
            axis.plot(steps, values, label=name, alpha=0.9, **style)
        else:
            pale = {"linestyle": "-", "lw": 0.8, "marker": None}
            axis.plot(steps, values, label=name, alpha=0.45, **style | pale)
            mean = f"{name}, mean of {window} points"
            axis.plot(steps, _running_mean(values, window), label=mean, **style | {"marker": None})
    axis.set(xlabel="step")
    if len(curves) > MOST_INSIDE:
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:  # several names in two columns leave room for the curves
        axis.legend(fontsize=8, ncols=2 if len(curves) > 3 else 1)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _last(name: str) -> str:
    return name.partition("/")[2]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` values before it."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]
