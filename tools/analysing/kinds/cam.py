"""Class activation maps at any block, over the images (Grad-CAM and its relatives; AFBO Fig. 3, 4).

A row an image, a column a network; the colours of each map reach to its own maximum, or with
scale=shared to that of all networks. Without class= the map is for the class that the network
predicts; class=label is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.analysing import Findings
from tools.analysing.pictures import bare, enlarged, new_figure, overlaid, picture_of, wrapped

if TYPE_CHECKING:
    from torch import Tensor

    from tools.analysing.subjects import Batch, Subject

OPTIONS = {"method": "gradcam", "block": "-1", "class": "predicted", "scale": "own", "images": "6"}
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
    "peak_row": ("peak row", "{}"),
    "peak_column": ("column", "{}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """The maps of each network on the same images."""
    from pathlib import Path

    from backbones.analysis.capturing import choose_blocks
    from backbones.analysis.class_activation import class_activation

    seen: list[list[tuple[Tensor, Tensor, str]]] = []
    rows = []
    for subject in subjects:
        (block,) = choose_blocks(subject.backbone, [options["block"]])
        column = []
        for batch in subject.batches():
            wanted = _classes(subject, batch, options["class"])
            maps, classes = class_activation(
                subject.classifier(), subject.backbone, batch.images, wanted,
                block=block, method=options["method"],  # type: ignore[arg-type]
            )  # fmt: skip
            shares = subject.logits(batch.images).softmax(-1)
            for index, (image, map_) in enumerate(zip(batch.images, maps, strict=True)):
                size = (image.shape[1], image.shape[2])
                grown = enlarged(map_, size)
                peak = divmod(int(grown.argmax()), size[1])
                label, chosen = int(batch.labels[index]), int(classes[index])
                share = float(shares[index, chosen])
                rows.append({
                    "image": Path(batch.names[index]).name,
                    "backbone": subject.label,
                    "layer": subject.backbone.cam_layer(block),
                    "label": subject.class_name(label) if label >= 0 else None,
                    "class": subject.class_name(chosen),
                    "probability": share,
                    "peak_row": peak[0],
                    "peak_column": peak[1],
                    "greatest": float(map_.max()),
                })  # fmt: skip
                column.append((image, map_, f"{subject.class_name(chosen)} ({share:.2f})"))
        seen.append(column)
    figure = _draw(subjects, seen, shared=options["scale"] == "shared")
    return Findings(rows, rows, COLUMNS, {"cam": figure})


def _classes(subject: Subject, batch: Batch, wanted: str) -> Tensor | None:
    """The class of each image, or None for the predicted ones."""
    import torch

    if wanted == "predicted":
        return None
    if wanted == "label":
        if int(batch.labels.min()) < 0:
            raise ValueError("class=label, but nobody knows the classes of these images")
        return batch.labels
    if wanted.isdecimal():
        label = int(wanted)
    elif wanted in subject.class_names:
        label = subject.class_names.index(wanted)
    else:
        from backbones.options import unknown

        raise ValueError(unknown("class", wanted, list(subject.class_names)))
    return torch.full((len(batch.images),), label)


def _draw(
    subjects: Sequence[Subject], seen: Sequence[Sequence[tuple[Tensor, Tensor, str]]], shared: bool
) -> object:
    count = min(map(len, seen))
    figure, axes = new_figure(count, 1 + len(subjects), 2.0, 2.2)
    for row in range(count):
        picture = picture_of(seen[0][row][0], subjects[0])
        axes[row, 0].imshow(picture)
        bare(axes[row, 0])
        greatest = max(float(column[row][1].max()) for column in seen)
        for place, (subject, column) in enumerate(zip(subjects, seen, strict=True), start=1):
            image, map_, title = column[row]
            size = (image.shape[1], image.shape[2])
            own = float(map_.max())
            heat = enlarged(map_, size)
            overlaid(
                axes[row, place], picture_of(image, subject), heat, greatest if shared else own
            )
            axes[row, place].set_xlabel(title, fontsize=7)
            if row == 0:
                axes[row, place].set_title(wrapped(subject.label, 24), fontsize=8)
    return figure
