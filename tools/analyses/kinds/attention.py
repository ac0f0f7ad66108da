"""Attention maps, rollout, and mean attention distance per layer and head.

The maps show what the class token reads; without one, the centre token of the map or window. They
are averaged over heads and drawn for ``layers`` layers. Rollout combines all layers, if each
attends over one whole map. The distance is in pixels of the image, one point per head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import (
    Panels,
    denormalise,
    draw_overlay,
    finish,
    hide_axes,
    new_figure,
    panel_grid,
    resize_map,
    select_evenly,
    wrap_text,
)
from tools.cli.arguments import parse_integer
from tools.plotting.colours import COLOURS

if TYPE_CHECKING:
    from torch import Tensor

    from tools.analyses.subjects import Subject

OPTIONS = {"layers": "6", "images": "4"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "heads": ("heads", "{}"),
    "distance": ("mean distance px", "{:.1f}"),
    "least": ("least head", "{:.1f}"),
    "greatest": ("greatest head", "{:.1f}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the attention of each network."""
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    heads: dict[str, list[Tensor]] = {}
    grids: dict[str, Panels] = {}
    rolled: list[tuple[str, Any, Any]] = []
    for subject in subjects:
        distances, maps = _measure(subject, rolled)
        heads[subject.label] = list(distances.values())
        for name, values in distances.items():
            summary.append({
                "backbone": subject.label, "layer": name, "heads": len(values),
                "distance": float(values.mean()), "least": float(values.min()),
                "greatest": float(values.max()),
            })  # fmt: skip
            rows += [
                {"backbone": subject.label, "layer": name, "head": head, "distance": value}
                for head, value in enumerate(values.tolist(), start=1)
            ]
        names = select_evenly(list(maps), parse_integer("layers", options["layers"]))
        grids[subject.label] = {
            name: [(f"image {i + 1}", map_ / map_.max()) for i, map_ in enumerate(maps[name])]
            for name in names
        }
    figures = {"attention": panel_grid(grids, colours="viridis"), "distance": _draw_heads(heads)}
    if rolled:
        figures["rollout"] = _draw_rollout(rolled)
    return Findings(rows, summary, COLUMNS, figures)


def _measure(
    subject: Subject, rolled: list[tuple[str, Any, Any]]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Measure each head's mean distance and each image's maps; add rollouts to ``rolled``."""
    import torch

    from backbones.analysis.attention import record_attention, rollout

    distances: dict[str, list[Tensor]] = {}
    maps: dict[str, list[Tensor]] = {}
    for batch in subject.batches():
        weights = record_attention(subject.backbone, batch.images)
        for name, layer in weights.items():
            distances.setdefault(name, []).append(layer.distances())
            maps.setdefault(name, []).extend(layer.maps().mean(1))
        if len(weights) < len(subject.backbone.block_names()):
            continue
        with suppress(ValueError):  # undefined for windows and reduced keys
            total = rollout(weights)
            last = list(weights.values())[-1]
            prefix = last.num_prefix_tokens
            # What the class token has finally read, or the mean over all tokens.
            read = total[:, 0, prefix:] if prefix else total.mean(1)
            for image, row in zip(batch.images, read, strict=True):
                size = (image.shape[1], image.shape[2])
                map_ = resize_map(row.unflatten(0, last.key_size), size)
                rolled.append((subject.label, denormalise(image, subject), map_))
    return {name: torch.cat(parts).mean(0) for name, parts in distances.items()}, maps


def _draw_heads(heads: Mapping[str, Sequence[Tensor]]) -> Any:
    figure, axes = new_figure(width=7.0, height=4.0)
    axis = axes[0, 0]
    for index, (label, layers) in enumerate(heads.items()):
        colour = COLOURS[index % len(COLOURS)]
        means = [float(values.mean()) for values in layers]
        axis.plot(range(1, len(layers) + 1), means, color=colour, label=label)
        for place, values in enumerate(layers, start=1):
            axis.scatter([place] * len(values), values.tolist(), s=12, color=colour, alpha=0.6)
    axis.set(title="Mean attention distance", xlabel="layer", ylabel="pixels")
    finish(axis, len(heads) > 1)
    return figure


def _draw_rollout(rolled: Sequence[tuple[str, Any, Any]]) -> Any:
    figure, axes = new_figure(2, len(rolled), 2.0, 2.1)
    for column, (label, picture, map_) in enumerate(rolled):
        axes[0, column].imshow(picture)
        axes[0, column].set_title(wrap_text(label, 24), fontsize=8)
        hide_axes(axes[0, column])
        draw_overlay(axes[1, column], picture, map_, float(map_.max()))
    return figure
