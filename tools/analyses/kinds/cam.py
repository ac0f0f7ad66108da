"""Class activation maps at any block, over the images (Grad-CAM and its relatives; AFBO Fig. 3, 4).

One row per image, one column per network; the colours of a map span its own range, or with
scale=shared that of all networks. class= defaults to the predicted class; class=label is the true
one. For segmentors the map explains the pixels assigned to a class, by default that of most pixels.
For detectors it explains the boxes of a class, by default that with the highest sum of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import (
    denormalise,
    draw_overlay,
    enlarge_map,
    hide_axes,
    new_figure,
    resize_map,
    wrap_text,
)

if TYPE_CHECKING:
    from tools.analyses.subjects import Batch, Subject

OPTIONS = {"method": "gradcam", "block": "-1", "class": "predicted", "scale": "own", "images": "6"}
# Text below a map: how much of the class was found.
TITLES = {"probability": "{:.2f}", "pixels": "{:.0%} of the pixels", "boxes": "boxes: {}"}
CHOICES = {
    "method": ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam", "eigencam"),
    "scale": ("own", "shared"),
}
COLUMNS = {
    "image": ("image", "{}"),
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "label": ("right", "{}"),
    "class": ("map for", "{}"),
    "probability": ("probability", "{:.3f}"),
    "pixels": ("of the pixels", "{:.1%}"),
    "boxes": ("boxes", "{}"),
    "peak_row": ("peak row", "{}"),
    "peak_column": ("column", "{}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Compute the maps of each network on the same images."""
    from tools.analyses.evidence import evidence_unit

    if len({evidence_unit(subject) for subject in subjects}) > 1:
        raise ValueError(
            "networks of different tasks need different images; draw their maps separately"
        )
    networks: list[list[Panel]] = []
    rows: list[dict[str, Any]] = []
    notes = []
    for subject in subjects:
        column = [
            panel for batch in subject.batches() for panel in map_panels(subject, batch, options)
        ]
        rows += [panel.row for panel in column]
        blanks = [panel.row["image"] for panel in column if not panel.hit]
        if blanks:
            notes.append(
                f"{subject.label} does not find the class in {len(blanks)} of {len(column)} "
                f"images; their maps are empty: {', '.join(blanks)}"
            )
        against = [panel.row["image"] for panel in column if panel.hit and not panel.heat.any()]
        if against:
            notes.append(
                f"{column[0].row['layer']} of {subject.label} does not support the class in "
                f"{len(against)} of {len(column)} images; their maps are empty: "
                f"{', '.join(against)}"
            )
        networks.append(column)
    figure = _draw(subjects, networks, shared=options["scale"] == "shared")
    return Findings(rows, rows, COLUMNS, {"cam": figure}, notes)


@dataclass(frozen=True)
class Panel:
    """Map of one image, both without padding, with its row of the table."""

    row: dict[str, Any]
    picture: Any
    heat: Any
    title: str
    hit: bool


def map_panels(subject: Subject, batch: Batch, options: Mapping[str, str]) -> list[Panel]:
    """Return the map of each image of a batch; ``options`` are those of the analysis."""
    import torch

    from backbones.analysis.capturing import choose_blocks
    from backbones.analysis.class_activation import class_activation
    from tools.analyses.evidence import asked_classes, evidence, evidence_unit

    (block,) = choose_blocks(subject.backbone, [options["block"]])
    with torch.no_grad():
        result = evidence(subject, batch, batch.images)
    classes = asked_classes(subject, batch, options["class"])
    classes = result.predicted if classes is None else classes
    if int(classes.max()) >= result.scores.shape[1]:
        raise ValueError(
            f"the network has classes 0 to {result.scores.shape[1] - 1}, got {int(classes.max())}"
        )
    amounts = result.amounts.gather(1, classes[:, None]).flatten().tolist()
    maps = torch.zeros(len(classes), 1, 1)
    if any(amounts):
        maps, _ = class_activation(
            lambda images: evidence(subject, batch, images).scores, subject.backbone,
            batch.images, classes, block=block,
            method=options["method"],  # type: ignore[arg-type]
        )  # fmt: skip
    kind = evidence_unit(subject)
    panels = []
    for index, (image, map_) in enumerate(zip(batch.images, maps, strict=True)):
        height, width = batch.inside[index]
        size = (image.shape[1], image.shape[2])
        heat = enlarge_map(map_, size)[:height, :width]
        peak = divmod(int(heat.argmax()), width) if heat.any() else (None, None)
        label, name = int(batch.labels[index]), subject.class_name(int(classes[index]))
        right = {"label": subject.class_name(label) if label >= 0 else None}
        row = {
            "image": Path(batch.names[index]).name,
            "backbone": subject.label,
            "layer": subject.backbone.cam_layer(block),
            **(right if kind == "probability" else {}),
            "class": name,
            kind: amounts[index],
            "peak_row": peak[0],
            "peak_column": peak[1],
            "greatest": float(map_.max()),
        }
        title = f"{name} ({TITLES[kind].format(amounts[index])})"
        picture = denormalise(image[:, :height, :width], subject)
        panels.append(
            Panel(
                row,
                picture,
                resize_map(map_, size)[:height, :width],
                title,
                kind == "probability" or amounts[index] > 0,
            )
        )
    return panels


def _draw(subjects: Sequence[Subject], networks: Sequence[Sequence[Panel]], shared: bool) -> object:
    count = min(map(len, networks))
    figure, axes = new_figure(count, 1 + len(subjects), 2.0, 2.2)
    for row in range(count):
        axes[row, 0].imshow(networks[0][row].picture)
        hide_axes(axes[row, 0])
        greatest = max(float(column[row].heat.max()) for column in networks)
        for place, (subject, column) in enumerate(zip(subjects, networks, strict=True), start=1):
            panel = column[row]
            most = greatest if shared else float(panel.heat.max())
            draw_overlay(axes[row, place], panel.picture, panel.heat, most)
            axes[row, place].set_xlabel(wrap_text(panel.title, 28), fontsize=7)
            if row == 0:
                axes[row, place].set_title(wrap_text(subject.label, 24), fontsize=8)
    return figure
