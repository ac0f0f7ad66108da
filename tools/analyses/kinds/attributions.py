"""Contribution of each pixel to a class: integrated gradients, occlusion and more (by Captum).

One row per image, one column per network; red supports the class, blue opposes it. saliency and
smoothgrad are unsigned: bright is strong. class= defaults to the predicted class; class=label is
the true one. steps is the number of images between a plain image of the mean colour and the image,
or with noise; window is the side in pixels that occlusion covers (default: an eighth of the image).
For classifiers. Integrated gradients sum to the difference between the logits of the image and the
plain one; the table shows the rest, which more steps reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import denormalise, hide_axes, new_figure, wrap_text
from tools.cli.arguments import parse_integer
from tools.plotting.colours import colour_bar

if TYPE_CHECKING:
    from tools.analyses.subjects import Batch, Subject

OPTIONS = {
    "method": "integrated_gradients", "class": "predicted", "steps": "50", "window": "0",
    "images": "6",
}  # fmt: skip
CHOICES = {
    "method": (
        "integrated_gradients", "gradient_shap", "input_x_gradient", "saliency", "smoothgrad",
        "occlusion",
    )
}  # fmt: skip
COLUMNS = {
    "image": ("image", "{}"),
    "backbone": ("backbone", "{}"),
    "label": ("right", "{}"),
    "class": ("for", "{}"),
    "probability": ("probability", "{:.3f}"),
    "difference": ("logit over plain image's", "{:.4f}"),
    "sum": ("sum", "{:.4f}"),
    "missing": ("missing", "{:.2g}"),
}
REACH = 0.99  # share of the pixels within the colour scale; few exceed it by far


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the attributions of each network on the same images."""
    parse_integer("steps", options["steps"])
    parse_integer("window", options["window"], least=0)
    rows: list[dict[str, Any]] = []
    networks = []
    for subject in subjects:
        subject.classifier()
        column = [
            item
            for batch in subject.batches()
            for item in _attribute_batch(subject, batch, options)
        ]
        rows += [row for row, _, _ in column]
        networks.append(column)
    figure = _draw(subjects, networks, options["method"])
    return Findings(rows, rows, COLUMNS, {"attributions": figure})


def _attribute_batch(
    subject: Subject, batch: Batch, options: Mapping[str, str]
) -> list[tuple[dict[str, Any], Any, Any]]:
    """Return the row, the image and the map of each image."""
    import torch

    from tools.analyses.attributing import COMPLETE, attributions
    from tools.analyses.evidence import asked_classes

    model = subject.classifier()
    with torch.no_grad():
        logits, baseline = model(batch.images), model(torch.zeros_like(batch.images[:1]))
    classes = asked_classes(subject, batch, options["class"])
    classes = logits.argmax(1) if classes is None else classes
    if int(classes.max()) >= logits.shape[1]:
        raise ValueError(
            f"the network has classes 0 to {logits.shape[1] - 1}, got {int(classes.max())}"
        )
    maps = attributions(
        model, batch.images, classes, steps=int(options["steps"]), window=int(options["window"]),
        method=options["method"],  # type: ignore[arg-type]
    )  # fmt: skip
    results: list[tuple[dict[str, Any], Any, Any]] = []
    for index, target in enumerate(classes.tolist()):
        label = int(batch.labels[index])
        scores = logits[index]
        row: dict[str, Any] = {
            "image": Path(batch.names[index]).name,
            "backbone": subject.label,
            "label": subject.class_name(label) if label >= 0 else None,
            "class": subject.class_name(target),
            "probability": float(scores.softmax(0)[target]),
        }
        if options["method"] in COMPLETE:
            difference = float(scores[target] - baseline[0, target])
            total = float(maps[index].double().sum())
            row |= {"difference": difference, "sum": total, "missing": difference - total}
        results.append((row, denormalise(batch.images[index], subject), maps[index]))
    return results


def _draw(subjects: Sequence[Subject], networks: Sequence[Sequence[Any]], method: str) -> object:
    from tools.analyses.attributing import SIGNED

    count = min(map(len, networks))
    figure, axes = new_figure(count, 1 + len(subjects), 2.0, 2.2)
    for index in range(count):
        axes[index, 0].imshow(networks[0][index][1])
        hide_axes(axes[index, 0])
        for place, (subject, column) in enumerate(zip(subjects, networks, strict=True), start=1):
            row, _, map_ = column[index]
            reach = float(map_.abs().double().flatten().quantile(REACH)) or 1.0
            axis = axes[index, place]
            low, colours = (-reach, "RdBu_r") if method in SIGNED else (0.0, "magma")
            image = axis.imshow(map_.cpu().numpy(), cmap=colours, vmin=low, vmax=reach)
            hide_axes(axis)
            colour_bar(figure, image, axis, size=5)
            axis.set_xlabel(wrap_text(f"{row['class']} ({row['probability']:.2f})", 28), fontsize=7)
            if index == 0:
                axis.set_title(wrap_text(subject.label, 24), fontsize=8)
    return figure
