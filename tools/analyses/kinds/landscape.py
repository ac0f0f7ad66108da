"""The loss along two filter-normalised directions, and the Hessian's largest eigenvalue.

The loss is the cross entropy of the labelled images; for segmentors the mean over valid pixels at
the size of the annotations, without auxiliary heads. The grid has ``points`` x ``points`` points
from -``span`` to ``span`` filter lengths around the weights. All networks share the colour scale.
The eigenvalue comes from power iteration in double precision; "unsettled" is its relative change in
the last iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.engine.family import imported
from tools.analyses import Findings
from tools.analyses.figures import new_figure, wrap_text
from tools.cli.arguments import parse_integer

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"points": "9", "span": "1.0", "iterations": "20", "seed": "0"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "images": ("images", "{}"),
    "loss": ("loss", "{:.4f}"),
    "eigenvalue": ("largest eigenvalue", "{:.4g}"),
    "unsettled": ("unsettled", "{:.1%}"),
    "rise": ("mean loss at the edge", "{:.4f}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Compute the loss surface of each network."""
    import torch

    from backbones.analysis.landscape import largest_curvature, surface

    points = parse_integer("points", options["points"], 2)
    span = _span(options["span"])
    seed = parse_integer("seed", options["seed"], 0)
    places = torch.linspace(-span, span, points).tolist()
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    surfaces = []
    for subject in subjects:
        network, objective, images = imported(subject.family.analyses["landscape"], __name__)(
            subject
        )
        values = surface(network, objective, places, seed)
        network.double()
        iterations = parse_integer("iterations", options["iterations"])
        eigenvalue, unsettled = largest_curvature(network, objective, iterations, seed)
        edge = torch.cat([values[0], values[-1], values[1:-1, 0], values[1:-1, -1]])
        with torch.no_grad():
            loss = float(objective())
        summary.append({
            "backbone": subject.label, "images": images, "loss": loss, "eigenvalue": eigenvalue,
            "unsettled": unsettled, "rise": float(edge.mean()),
        })  # fmt: skip
        rows += [
            {"backbone": subject.label, "a": a, "b": b, "loss": float(value)}
            for a, line in zip(places, values, strict=True)
            for b, value in zip(places, line, strict=True)
        ]
        surfaces.append((subject.label, values))
    figures = {"landscape": _draw(surfaces, places)}
    return Findings([*summary, *rows], summary, COLUMNS, figures)


def detector_objective(subject: Subject) -> tuple[Any, Any, int]:
    """Raise an error, since the loss of a detector jumps.

    Raises:
        ValueError: Always, with the reason.
    """
    raise ValueError(
        f"the loss of {subject.label} matches boxes to objects anew at every weight, so it "
        "jumps; pass a classifier or a segmentor"
    )


def classifier_objective(subject: Subject) -> tuple[Any, Any, int]:
    """Return a copy of the network, its loss on the images, and the number of images."""
    import copy

    import torch
    import torch.nn.functional as F

    network: Any = copy.deepcopy(subject.classifier())
    batches = [(batch.images, batch.labels) for batch in subject.batches()]
    labels = torch.cat([part for _, part in batches])
    if int(labels.min()) < 0:
        raise ValueError(_unlabelled(subject))

    def objective() -> torch.Tensor:
        weights = next(network.parameters())
        parts = [
            F.cross_entropy(network(images.to(weights)), truth, reduction="sum")
            for images, truth in batches
        ]
        return torch.stack(parts).sum() / len(labels)

    return network, objective, len(labels)


def segmentor_objective(subject: Subject) -> tuple[Any, Any, int]:
    """Return a copy of the network, its loss on the images, and the number of images."""
    import copy

    import torch
    import torch.nn.functional as F

    from tasks.segmentation.task import IGNORED

    if subject.size is not None:
        raise ValueError(
            f"the landscape of {subject.label} uses its validation size; leave image_size= out"
        )
    task: Any = subject.task
    network = copy.deepcopy(task.model)
    batches = [batch.samples for batch in subject.batches()]
    truths = [sample.get("gt_sem_seg") for batch in batches for sample in batch["data_samples"]]
    if any(truth is None for truth in truths):
        raise ValueError(_unlabelled(subject))
    pixels = sum(int((truth.data != IGNORED).sum()) for truth in truths)

    def objective() -> torch.Tensor:
        parts = [
            F.cross_entropy(
                sample.seg_logits.data[None], sample.gt_sem_seg.data.long(),
                ignore_index=IGNORED, reduction="sum",
            )
            for batch in batches
            for sample in network.predict(copy.deepcopy(batch))
        ]  # fmt: skip
        return torch.stack(parts).sum() / pixels

    return network, objective, len(truths)


def task_objective(subject: Subject) -> tuple[Any, Any, int]:
    """Return a copy of the network, its validation loss on the inputs, and their number."""
    import copy

    import torch

    task: Any = copy.copy(subject.task)
    network = copy.deepcopy(task.model)
    task.model = network
    batches = [batch.samples for batch in subject.batches()]

    def objective() -> torch.Tensor:
        dtype = next(network.parameters()).dtype  # double for the curvature
        cast = [
            {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
            for batch in batches
        ]
        parts = [task.evaluation_loss(batch, network.predict(batch)) for batch in cast]
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    return network, objective, sum(len(next(iter(batch.values()))) for batch in batches)


def multi_label_objective(subject: Subject) -> tuple[Any, Any, int]:
    """Return ``task_objective`` of images with known labels."""
    if any(batch.labels.ndim != 2 for batch in subject.batches()):
        raise ValueError(_unlabelled(subject))
    return task_objective(subject)


def _unlabelled(subject: Subject) -> str:
    return (
        f"the landscape of {subject.label} needs labelled images: leave input= out, or pass a "
        "dataset"
    )


def _span(text: str) -> float:
    try:
        span = float(text)
    except ValueError:
        span = 0.0
    if not 0 < span < 1e6:
        raise ValueError(f"span must be a number above 0; got {text!r}")
    return span


def _draw(surfaces: Sequence[tuple[str, Any]], places: Sequence[float]) -> Any:
    import numpy as np

    figure, axes = new_figure(1, len(surfaces), 3.6, 3.6)
    finite = np.concatenate([np.asarray(v).ravel() for _, v in surfaces])
    finite = finite[np.isfinite(finite)]
    levels = np.linspace(finite.min(), np.quantile(finite, 0.98) + 1e-9, 16)
    for axis, (label, values) in zip(axes[0], surfaces, strict=True):
        surface = axis.contourf(places, places, np.asarray(values), levels, cmap="viridis",
                              extend="max")  # fmt: skip
        axis.plot([0], [0], marker="+", color="white")
        axis.set_title(wrap_text(label, 32), fontsize=9)
    figure.colorbar(surface, ax=axes[0, -1], label="cross entropy", shrink=0.8)
    return figure
