"""Token-mixing matrices and position terms, by group or head (PosMLP Fig. 1, 5, 7, 8).

One row per layer: the weight of each token in one token's output, for up to ``groups`` groups or
heads. A bias b is drawn as another map. For window attention these are the position terms
(logits). Matrices that are sums also show their parts. ``matrices`` draws whole N x N matrices,
parts first, and their rows at the token. ``token`` is its row-major index in the window, from 0
(default: the centre; PosMLP's Fig. 7 uses 40). The curves show the mean distance of the weights
and, for Gaussians, the non-locality g of Eq. 16 (smaller is wider), without groups with an
eigenvalue below ``singular`` times the layer's largest. Only the weights are used; PosMLP's windows
are as large as the maps of the run's images, or of image_size=.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import (
    Panels,
    curves,
    hide_axes,
    new_figure,
    panel_grid,
    select_evenly,
    wrap_text,
)
from tools.cli.arguments import parse_integer
from tools.plotting.colours import COLOURS, colour_bar

if TYPE_CHECKING:
    from backbones.analysis.relations import Relation
    from tools.analyses.subjects import Subject

OPTIONS = {"groups": "6", "layers": "6", "token": "middle", "singular": "1e-4"}
MOST_DRAWN = 512  # tokens per matrix; larger ones are drawn as means of neighbours
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "kind": ("kind", "{}"),
    "groups": ("groups", "{}"),
    "window": ("map", "{}"),
    "distance": ("mean distance", "{:.3f}"),
    "non_locality": ("g (Eq. 16)", "{:.4f}"),
    "left_out": ("singular", "{}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the matrices of each network."""
    from backbones.analysis.relations import token_relations

    most, singular = parse_integer("groups", options["groups"]), _share(options["singular"])
    rows, summary, notes = [], [], []
    panels: dict[str, Panels] = {}
    biases: dict[str, Panels] = {}
    matrices: dict[str, Panels] = {}
    distances: dict[str, list[float]] = {}
    localities: dict[str, list[float]] = {}
    for subject in subjects:
        layers = token_relations(subject.backbone, _image_size(subject), singular=singular)
        tokens = _tokens(options["token"], layers)
        maps: dict[str, list[tuple[str, Any]]] = {}
        distances[subject.label] = []
        for name, relation in layers.items():
            distance = float(relation.mean_distance().nanmean())
            distances[subject.label].append(distance)
            if relation.non_locality is not None:
                localities.setdefault(subject.label, []).append(relation.non_locality)
            summary.append({
                "backbone": subject.label, "layer": name, "kind": relation.kind,
                "groups": len(relation.matrix), "window": f"{relation.size[0]}x{relation.size[1]}",
                "distance": distance, "non_locality": relation.non_locality,
                "left_out": relation.left_out if relation.non_locality is not None else None,
            })  # fmt: skip
            if name not in tokens:
                continue
            maps[name] = _maps(relation, tokens[name], most)
            rows += [
                {"backbone": subject.label, "layer": name, "map": title, "row": row,
                 "column": column, "value": value}
                for title, map_ in maps[name]
                for row, line in enumerate(map_.tolist()) for column, value in enumerate(line)
            ]  # fmt: skip
        left_out = sum(relation.left_out for relation in layers.values())
        groups = sum(
            len(relation.matrix)
            for relation in layers.values()
            if relation.non_locality is not None
        )
        if groups:
            notes.append(
                f"{subject.label}: g excludes {left_out} of {groups} matrices, because they have "
                f"an eigenvalue below {singular:g} of their layer's largest"
            )
        if len(tokens) < len(layers):
            notes.append(
                f"{subject.label}: {len(layers) - len(tokens)} of {len(layers)} layers are not "
                f"drawn, because their windows lack token {options['token']}"
            )
        names = select_evenly(list(maps), parse_integer("layers", options["layers"]))
        # The bias is another quantity, so it has its own figure and scale.
        panels[subject.label] = {
            name: [panel for panel in maps[name] if panel[0] != "b"] for name in names
        }
        biases[subject.label] = {
            name: [panel for panel in maps[name] if panel[0] == "b"] for name in names
        }
        matrices[subject.label] = {name: _matrices(layers[name], most) for name in names}
    figures = {"relations": panel_grid(panels), "matrices": _drawn_matrices(matrices, panels)}
    biased = {label: {n: p for n, p in layers.items() if p} for label, layers in biases.items()}
    if any(biased.values()):
        figures["bias"] = panel_grid({label: layers for label, layers in biased.items() if layers})
    figures["distance"] = curves(distances, "Mean distance of the weights", "tokens", "layer")
    if localities:
        figures["non_locality"] = curves(localities, "Non-locality g, Eq. 16", "g", "layer")
    return Findings(rows, summary, COLUMNS, figures, notes)


def _share(text: str) -> float:
    """Parse the option ``singular``."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError(f"singular must be a number from 0 to below 1; got {text!r}")
    return share


def _tokens(text: str, layers: Mapping[str, Relation]) -> dict[str, int]:
    """Parse the option ``token`` for every layer with that token in its window.

    Raises:
        ValueError: No window has it.
    """
    from backbones.analysis.relations import middle

    if text == "middle":
        return {name: middle(relation.size) for name, relation in layers.items()}
    last = max(relation.size[0] * relation.size[1] for relation in layers.values()) - 1
    if not text.isdecimal() or int(text) > last:
        raise ValueError(
            f"token must be middle or a whole number from 0 to {last}, the last token of the "
            f"largest window; got {text!r}"
        )
    return {
        name: int(text)
        for name, relation in layers.items()
        if int(text) < relation.size[0] * relation.size[1]
    }


def _maps(relation: Relation, token: int, most: int) -> list[tuple[str, Any]]:
    """Return the weights of one token's output, by group and by part, and the bias."""
    from backbones.analysis.relations import token_row

    groups = token_row(relation.matrix, relation.size, token)[:most]
    panels = [(f"group {i + 1}", map_) for i, map_ in enumerate(groups)]
    panels += [(k, token_row(part, relation.size, token)[0]) for k, part in relation.parts.items()]
    return panels if relation.bias is None else [*panels, ("b", relation.bias)]


def _matrices(relation: Relation, most: int) -> list[tuple[str, Any]]:
    """Return whole matrices, (N, N): the parts and their sum, or those of the first groups."""
    from torch.nn.functional import adaptive_avg_pool2d

    matrices = [(key, part[0]) for key, part in relation.parts.items()]
    matrices += [(f"group {i + 1}", matrix) for i, matrix in enumerate(relation.matrix[:most])]
    return [
        (title, adaptive_avg_pool2d(m[None].float(), MOST_DRAWN)[0] if len(m) > MOST_DRAWN else m)
        for title, m in matrices
    ]


def _drawn_matrices(panels: Mapping[str, Panels], rows: Mapping[str, Panels]) -> Any:
    """Draw each layer's matrices, then the token's rows in row-major order."""
    widths = [1 + max(map(len, layers.values())) for layers in panels.values()]
    figure, axes = new_figure(max(map(len, panels.values())), sum(widths), 1.7, 1.7)
    for axis in axes.flat:
        hide_axes(axis)
    start = 0
    for (label, layers), width in zip(panels.items(), widths, strict=True):
        axes[0, start].annotate(
            wrap_text(label, 24), (0, 1.25), xycoords="axes fraction", fontsize=7
        )
        for line, (layer, matrices) in enumerate(layers.items()):
            axes[line, start].set_ylabel(wrap_text(layer, 26), fontsize=7)
            for axis, (title, matrix) in zip(axes[line, start:], matrices, strict=False):
                image = axis.imshow(matrix.cpu().float().numpy(), cmap="turbo")
                axis.set_title(title, fontsize=7)
                colour_bar(figure, image, axis, size=5)  # each matrix has its own scale
            cut = axes[line, start + len(matrices)]
            for index, (_, row) in enumerate(rows[label][layer]):
                colour = COLOURS[index % len(COLOURS)]
                cut.plot(row.flatten().tolist(), linewidth=0.6, color=colour)
            cut.set_title("rows of the token", fontsize=7)
        start += width
    return figure


def _image_size(subject: Subject) -> tuple[int, int] | None:
    """Return (H, W) of the images, or None for a network without a run, with complete windows."""
    from tools.runs.report import training_size

    if subject.size is not None or subject.config is None:
        return subject.size
    return training_size(subject.config.data)
