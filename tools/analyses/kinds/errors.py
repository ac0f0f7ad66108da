"""Confusions, calibration, worst images; COCO's error breakdown of detectors, IoU of segmentors.

Classifiers: the confusion matrix (also in confusion.csv), the most confused pairs, and the
reliability curve with ECE (15 bins). The worst images have the lowest probability of their true
class. Segmentors: the IoU of each class over all pixels. Detectors: the area under precision over
recall at an IoU of 0.75 and 0.5. Then errors are forgiven one kind after the other: localisation
(Loc), similar classes (Sim), other classes (Oth), background (BG). All validation images are used;
images=N limits them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.engine.family import imported
from tools.analyses import Findings
from tools.analyses.figures import denormalise, finish, hide_axes, new_figure, wrap_text
from tools.plotting.colours import COLOURS, colour_bar
from tools.plotting.labels import cut, name_ticks

if TYPE_CHECKING:
    from torch import Tensor

    from tools.analyses.subjects import Subject

OPTIONS = {"images": "1000000", "pairs": "10"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "images": ("images", "{}"),
    "top1": ("top-1 %", "{:.2f}"),
    "ece": ("ECE %", "{:.2f}"),
    "class": ("class", "{}"),
    "guess": ("taken for", "{}"),
    "count": ("times", "{}"),
    "iou": ("IoU %", "{:.2f}"),
    "share": ("of the pixels", "{:.1%}"),
}
BREAKDOWN = ("C75", "C50", "Loc", "Sim", "Oth", "BG", "FN")
COLUMNS |= {kind: (kind, "{:.3f}") for kind in BREAKDOWN}
COLUMNS["left_out"] = ("left out of evaluation", "{}")
WORST = 8
CELL, WIDEST = 0.3, 15.0  # inches per class of a confusion matrix, and its maximum
NUMBERED = 50  # maximum number of classes for numbers in the cells of a confusion matrix


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the errors of each network; all must have the same task."""
    kinds = {subject.family.analyses["errors"] for subject in subjects}
    if len(kinds) > 1:
        raise ValueError(
            "networks of different tasks have different errors; analyse them separately"
        )
    find: Callable[..., Findings] = imported(kinds.pop(), __name__)
    return find(subjects, options)


def find_classifier_errors(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Find confusions, calibration and the worst images."""
    from tools.analyses.classification_errors import confused_pairs, confusion, reliability
    from tools.cli.arguments import parse_integer

    pairs = parse_integer("pairs", options["pairs"])
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    networks, worst = [], []
    for subject in subjects:
        probabilities, labels, images = _evaluate(subject)
        guesses, classes = probabilities.argmax(1), probabilities.shape[1]
        counts = confusion(guesses, labels, classes)
        calibration = reliability(probabilities, labels)
        total = {
            "backbone": subject.label, "images": len(labels),
            "top1": 100 * float((guesses == labels).double().mean()),
            "ece": 100 * calibration.error,
        }  # fmt: skip
        confused = [
            {"backbone": subject.label, "class": subject.class_name(right),
             "guess": subject.class_name(guess), "count": count}
            for right, guess, count in confused_pairs(counts, pairs)
        ]  # fmt: skip
        summary.append({**dict.fromkeys(("class", "guess", "count")), **total})
        summary += [{**dict.fromkeys(("images", "top1", "ece")), **record} for record in confused]
        rows += [total, *confused]
        rows += [
            {"backbone": subject.label, "bin": place + 1, "count": int(count),
             "confidence": float(confidence), "accuracy": float(accuracy)}
            for place, (count, confidence, accuracy) in enumerate(
                zip(calibration.counts, calibration.confidence, calibration.accuracy, strict=True)
            )
        ]  # fmt: skip
        rows += [
            {"backbone": subject.label, "image": name, "class": subject.class_name(label),
             "guess": subject.class_name(guess), "probability": share}
            for share, _, name, label, guess in images
        ]  # fmt: skip
        networks.append((subject, counts, calibration))
        worst.append((subject, images))
    order = ("backbone", "images", "top1", "ece", "class", "guess", "count")
    summary = [{key: record[key] for key in order} for record in summary]
    figures = {"errors": _draw(networks), "worst": _draw_worst(worst)}
    tables = {
        f"confusion{f'_{place}' if len(networks) > 1 else ''}.csv": _table(subject, counts)
        for place, (subject, counts, _) in enumerate(networks, start=1)
    }
    return Findings(rows, summary, COLUMNS, figures, files=tables)


def _table(subject: Subject, counts: Tensor) -> str:
    """Write a confusion matrix as CSV: one row per true class, one column per prediction."""
    names = [subject.class_name(label) for label in range(len(counts))]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([f"{subject.label}: right class", *names, "images"])
    for name, row in zip(names, counts.tolist(), strict=True):
        writer.writerow([name, *row, sum(row)])
    return file.getvalue()


Worst = tuple[float, Any, str, int, int]  # probability of the true class, image, file, both classes


def _evaluate(subject: Subject) -> tuple[Tensor, Tensor, list[Worst]]:
    """Return probabilities and labels of all images, and the worst images."""
    import torch

    parts, labels = [], []
    worst: list[Worst] = []
    with torch.no_grad():
        for batch in subject.batches():
            if int(batch.labels.min()) < 0:
                raise ValueError(
                    f"the errors of {subject.label} need labelled images: leave input= out, or "
                    "pass a dataset"
                )
            probabilities = subject.logits(batch.images).double().softmax(1)
            shares = probabilities.gather(1, batch.labels[:, None]).flatten().tolist()
            worst += zip(
                shares, batch.images, batch.names, batch.labels.tolist(),
                probabilities.argmax(1).tolist(), strict=True,
            )  # fmt: skip
            worst = sorted(worst, key=lambda row: row[0])[:WORST]
            parts.append(probabilities)
            labels.append(batch.labels)
    return torch.cat(parts), torch.cat(labels), worst


def _draw(networks: Sequence[tuple[Subject, Tensor, Any]]) -> Any:
    classes = max(len(counts) for _, counts, _ in networks)
    side = min(max(4.0, CELL * classes), WIDEST)
    figure, axes = new_figure(2, len(networks), side, side)
    axes[0, 0].get_gridspec().set_height_ratios([side, 4.0])
    figure.set_size_inches((side + 1.2) * len(networks), side + 4.0)
    for column, (subject, counts, calibration) in enumerate(networks):
        above, below = axes[:, column]
        _draw_confusion(figure, above, subject, counts)
        bins = len(calibration.counts)
        heights = calibration.accuracy.nan_to_num()
        places = [(place + 0.5) / bins for place in range(bins)]
        below.bar(places, heights, 1 / bins, color=COLOURS[0], edgecolor="white")
        below.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, zorder=3)
        below.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        below.set_title(f"ECE {100 * calibration.error:.2f} %", fontsize=9)
        finish(below, legend=False)
    return figure


def _draw_confusion(figure: Any, axis: Any, subject: Subject, counts: Tensor) -> None:
    """Draw the shares of each true class's images, with counts where there is room."""
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    image = axis.imshow(shares, cmap="magma_r", vmin=0, vmax=1)
    axis.set(xlabel="guess", ylabel="right class")
    axis.set_title(wrap_text(subject.label, 36), fontsize=9)
    names = [subject.class_name(label) for label in range(len(counts))]
    colour_bar(figure, image, axis, "share of the right class's images")
    name_ticks(axis, names, size=6)
    name_ticks(axis, names, vertical=True, size=6)
    if len(counts) > NUMBERED:
        return
    digits = len(str(int(counts.max())))
    size = min(7.0, 26 / max(2, digits))
    for row, values in enumerate(counts.tolist()):
        for column, count in enumerate(values):
            if count:
                colour = "white" if shares[row, column] > 0.5 else "black"
                axis.text(column, row, count, ha="center", va="center", color=colour, fontsize=size)


def _draw_worst(worst: Sequence[tuple[Subject, Sequence[Worst]]]) -> Any:
    figure, axes = new_figure(len(worst), max(len(images) for _, images in worst), 1.6, 2.0)
    for row, (subject, images) in enumerate(worst):
        for axis in axes[row]:
            hide_axes(axis)
        for axis, (share, image, _, label, guess) in zip(axes[row], images, strict=False):
            axis.imshow(denormalise(image, subject))
            right, wrong = (cut(subject.class_name(place), 40) for place in (label, guess))
            text = f"{wrap_text(right, 22)} ({share:.2g})\n{wrap_text(f'taken for {wrong}', 22)}"
            axis.set_title(text, fontsize=7)
        axes[row, 0].set_ylabel(wrap_text(subject.label, 20), fontsize=8)
    return figure


def find_segmentor_errors(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Find the IoU of each class."""
    import torch

    rows: list[dict[str, Any]] = []
    for subject in subjects:
        task: Any = subject.task
        task.reset_metrics()
        with torch.no_grad():
            for batch in subject.batches():
                task.update_metrics(batch.samples, task.model.predict(batch.samples))
        counts = task.confusion.compute().double()
        hits, truth = counts.diag(), counts.sum(1)
        union = truth + counts.sum(0) - hits
        rows += [
            {
                "backbone": subject.label, "class": subject.class_name(label),
                "iou": 100 * float(hits[label] / union[label]) if union[label] > 0 else None,
                "share": float(truth[label] / truth.sum()),
            }
            for label in range(len(counts))
        ]  # fmt: skip
        task.reset_metrics()
    names = subjects[0].class_names
    figure, axes = new_figure(width=min(max(7.0, 0.16 * len(names)), 30.0), height=4.0)
    width = 0.8 / len(subjects)
    for place, subject in enumerate(subjects):
        values = [record["iou"] or 0.0 for record in rows if record["backbone"] == subject.label]
        middle = (len(subjects) - 1) / 2
        starts = [label + (place - middle) * width for label in range(len(values))]
        axes[0, 0].bar(
            starts, values, width, label=subject.label, color=COLOURS[place % len(COLOURS)]
        )
    name_ticks(axes[0, 0], names)
    axes[0, 0].set(ylabel="IoU in %")
    finish(axes[0, 0], len(subjects) > 1)
    return Findings(rows, rows, COLUMNS, {"iou": figure})


def find_detector_errors(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Find precision over recall with kinds of errors forgiven one after the other."""
    import numpy as np
    import torch

    from tasks.detection.coco_metric import instances
    from tools.analyses.coco_errors import KINDS, precision_curves

    rows: list[dict[str, Any]] = []
    figure, axes = new_figure(1, len(subjects), 4.6, 3.8)
    for axis, subject in zip(axes[0], subjects, strict=True):
        task: Any = subject.task
        detections: list[dict[str, Any]] = []
        image_ids: list[int] = []
        with torch.no_grad():
            for batch in subject.batches():
                for sample in task.model.predict(batch.samples):
                    detections += instances(sample, subject.data.category_ids)
                    image_ids.append(int(sample.img_id))
        annotations = getattr(subject.data, "annotations", None)
        if annotations is None:
            raise ValueError(
                f"the errors of {subject.label} need annotated images: leave input= out, or pass a "
                "dataset"
            )
        curves = precision_curves(annotations, detections, image_ids, subject.data.category_ids)
        names = {category["id"]: category["name"] for category in annotations["categories"]}
        mean = np.mean(list(curves.values()), axis=0)
        for name, curve in [("all", mean), *((names[k], v) for k, v in curves.items())]:
            areas = dict(zip(KINDS, curve.mean(1).tolist(), strict=True))
            rows.append({"backbone": subject.label, "class": name, **areas})
            rows[-1]["left_out"] = subject.data.left_out or None
        recalls = np.linspace(0, 1, mean.shape[1])
        for place in reversed(range(len(KINDS))):
            axis.fill_between(recalls, mean[place], color=COLOURS[place], label=KINDS[place])
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="recall", ylabel="precision")
        axis.set_title(wrap_text(subject.label, 36), fontsize=9)
        finish(axis)
    if not any(row["left_out"] for row in rows):
        rows = [{key: value for key, value in row.items() if key != "left_out"} for row in rows]
    return Findings(rows, rows, COLUMNS, {"errors": figure})
