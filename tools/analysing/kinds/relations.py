"""Token-mixing matrices and position terms, by group or head (PosMLP Fig. 1, 5, 7, 8).

One row a layer: what the token in the middle takes from each, for up to ``groups`` groups or heads;
the bias b as a map where there is one. Of window attention it is the position term, logits.
Matrices that are sums have their parts besides. The curve is the mean distance of the weights, and
of Gaussians the non-locality g of Eq. 16 (smaller reaches further). Weights alone tell; windows of
PosMLP are as large as the maps of the run's images, or of image_size=, let them be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analysing import Findings
from tools.analysing.pictures import Panels, curves, evenly, panel_grid
from tools.command_line.arguments import number

if TYPE_CHECKING:
    from tools.analysing.subjects import Subject

OPTIONS = {"groups": "6", "layers": "6"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "kind": ("kind", "{}"),
    "groups": ("groups", "{}"),
    "window": ("map", "{}"),
    "distance": ("mean distance", "{:.3f}"),
    "non_locality": ("g (Eq. 16)", "{:.4f}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """The matrices of each network."""
    from backbones.analysis.relations import centre_row, token_relations

    most = number("groups", options["groups"])
    rows, shown = [], []
    drawn: dict[str, Panels] = {}
    biases: dict[str, Panels] = {}
    distances: dict[str, list[float]] = {}
    localities: dict[str, list[float]] = {}
    for subject in subjects:
        found = token_relations(subject.backbone, _image_size(subject))
        maps: dict[str, list[tuple[str, Any]]] = {}
        distances[subject.label] = []
        for name, one in found.items():
            reach = one.mean_distance()
            rows_, columns_ = one.size
            distances[subject.label].append(float(reach.nanmean()))
            if one.non_locality is not None:
                localities.setdefault(subject.label, []).append(one.non_locality)
            shown.append({
                "backbone": subject.label, "layer": name, "kind": one.kind,
                "groups": len(one.matrix), "window": f"{rows_}x{columns_}",
                "distance": float(reach.nanmean()), "non_locality": one.non_locality,
            })  # fmt: skip
            panels = [(f"group {i + 1}", m) for i, m in enumerate(one.centre_maps()[:most])]
            parts = {key: centre_row(part, one.size)[0] for key, part in one.parts.items()}
            panels += list(parts.items())
            panels += [] if one.bias is None else [("b", one.bias)]
            maps[name] = panels
            rows += [
                {"backbone": subject.label, "layer": name, "map": title, "row": row,
                 "column": column, "value": value}
                for title, map_ in panels
                for row, line in enumerate(map_.tolist()) for column, value in enumerate(line)
            ]  # fmt: skip
        names = evenly(list(maps), number("layers", options["layers"]))
        # The bias is another quantity, so it has a picture and a scale of its own.
        drawn[subject.label] = {
            name: [panel for panel in maps[name] if panel[0] != "b"] for name in names
        }
        biases[subject.label] = {
            name: [panel for panel in maps[name] if panel[0] == "b"] for name in names
        }
    figures = {"relations": panel_grid(drawn)}
    biased = {label: {n: p for n, p in one.items() if p} for label, one in biases.items()}
    if any(biased.values()):
        figures["bias"] = panel_grid({label: one for label, one in biased.items() if one})
    figures["distance"] = curves(distances, "Mean distance of the weights", "tokens", "layer")
    if localities:
        figures["non_locality"] = curves(localities, "Non-locality g, Eq. 16", "g", "layer")
    return Findings(rows, shown, COLUMNS, figures)


def _image_size(subject: Subject) -> tuple[int, int] | None:
    """(H, W) of the images; of a network of no run, whose windows are whole, None."""
    from tools.running.report import training_size

    if subject.size is not None or subject.config is None:
        return subject.size
    return training_size(subject.config["data"])
