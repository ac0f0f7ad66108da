"""Channel-mapping matrices, structure and weights, and which channels interact (AFBO Fig. 2).

One row per layer: |weights| of each mapping from C channels to hidden ones, white where an output
does not read an input. For mixers that multiply two branches also the weight of each product of two
channels in the output. Only the weights are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import Panels, panel_grid, select_evenly
from tools.cli.arguments import parse_integer

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"layers": "4"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "mapping": ("mapping", "{}"),
    "size": ("size", "{}"),
    "density": ("not zero", "{:.1%}"),
    "mean": ("mean |w|", "{:.4f}"),
    "greatest": ("greatest", "{:.4f}"),
}
SIDE = 192  # maximum side in figures and in the CSV; larger matrices are averaged in blocks


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the mappings of each network."""
    from backbones.analysis.mappings import channel_mappings

    rows: list[dict[str, Any]] = []
    weights: dict[str, Panels] = {}
    products: dict[str, Panels] = {}
    for subject in subjects:
        layers = channel_mappings(subject.backbone)
        names = select_evenly(list(layers), parse_integer("layers", options["layers"]))
        weights[subject.label], products[subject.label] = {}, {}
        for name, layer in layers.items():
            density = layer.density()
            matrices = dict(layer.matrices)
            if layer.interactions is not None:
                matrices["interactions"] = layer.interactions
                density["interactions"] = float((layer.interactions != 0).double().mean())
            for mapping, matrix in matrices.items():
                height, width = matrix.shape
                rows.append({
                    "backbone": subject.label, "layer": name, "mapping": mapping,
                    "size": f"{height}x{width}", "density": density[mapping],
                    "mean": float(matrix.abs().mean()), "greatest": float(matrix.abs().max()),
                })  # fmt: skip
        weights[subject.label] = {
            name: [(key, _reduced(m)) for key, m in layers[name].matrices.items()] for name in names
        }
        products[subject.label] = {
            name: [("interactions", _reduced(pairs))]
            for name in names
            if (pairs := layers[name].interactions) is not None
        }
    figures = {"mappings": panel_grid(weights, colours="magma_r")}
    multiplied = {label: panels for label, panels in products.items() if panels}
    if multiplied:
        figures["interactions"] = panel_grid(multiplied, colours="magma_r")
    return Findings(rows, rows, COLUMNS, figures)


def _reduced(matrix: Any) -> Any:
    """Average |w| to at most SIDE x SIDE; blocks of zeros stay zero."""
    import torch.nn.functional as F

    size = tuple(min(SIDE, side) for side in matrix.shape)
    return F.adaptive_avg_pool2d(matrix.abs()[None].float(), size)[0]
