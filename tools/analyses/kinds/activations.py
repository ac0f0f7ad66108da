"""Learnt shapes of AGeLU, PReLU and RPReLU against GELU, per layer and channel (IFFN Fig. 3).

One thin line per channel and a dotted line for GELU; below, the distribution of the learnt
coefficients. Only the weights are used, not images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import finish, new_figure, select_evenly, wrap_text
from tools.cli.arguments import parse_integer
from tools.plotting.colours import COLOURS

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"reach": "4", "layers": "6"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "kind": ("kind", "{}"),
    "coefficient": ("coefficient", "{}"),
    "least": ("least", "{:.3f}"),
    "mean": ("mean", "{:.3f}"),
    "greatest": ("greatest", "{:.3f}"),
    "negative": ("below 0", "{:.1%}"),
}
MOST_CHANNELS = 64  # lines per panel; with more channels evenly spaced ones are drawn


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the activations of each network; ``layers`` of them, evenly spaced, are drawn."""
    import torch

    from backbones.analysis.learnt_activations import learnt_activations

    reach = parse_integer("reach", options["reach"])
    points = torch.linspace(-reach, reach, 101)
    rows, summary = [], []
    networks: list[tuple[str, dict[str, Any]]] = []
    for subject in subjects:
        layers = learnt_activations(subject.backbone, points)
        for name, activation in layers.items():
            for key, values in activation.coefficients.items():
                summary.append({
                    "backbone": subject.label, "layer": name, "kind": activation.kind,
                    "coefficient": key, "least": float(values.min()), "mean": float(values.mean()),
                    "greatest": float(values.max()),
                    "negative": float((values < 0).double().mean()),
                })  # fmt: skip
                rows += [
                    {"backbone": subject.label, "layer": name, "kind": activation.kind,
                     "coefficient": key, "channel": channel, "value": value}
                    for channel, value in enumerate(values.tolist())
                ]  # fmt: skip
        names = select_evenly(list(layers), parse_integer("layers", options["layers"]))
        networks.append((subject.label, {name: layers[name] for name in names}))
    return Findings(rows, summary, COLUMNS, {"activations": _draw(networks, points)})


def _draw(networks: Sequence[tuple[str, Mapping[str, Any]]], points: Any) -> Any:
    """Draw two rows of panels per network; all curves share one vertical axis."""
    import torch.nn.functional as F

    columns = max(len(layers) for _, layers in networks)
    figure, axes = new_figure(2 * len(networks), columns, 2.6, 2.4)
    gelu = F.gelu(points)
    curves = [activation.curves for _, layers in networks for activation in layers.values()]
    low, high = min(float(c.min()) for c in curves), max(float(c.max()) for c in curves)
    for place, (label, layers) in enumerate(networks):
        upper, lower = axes[2 * place], axes[2 * place + 1]
        for axis in (*upper[len(layers) :], *lower[len(layers) :]):
            axis.set_visible(False)
        for above, below, (name, activation) in zip(upper, lower, layers.items(), strict=False):
            step = max(1, -(-len(activation.curves) // MOST_CHANNELS))
            lines = activation.curves[::step].T.float()
            above.plot(points, lines, color=COLOURS[0], linewidth=0.4, alpha=0.5)
            # Thin and dotted, because learnt curves may lie on it.
            above.plot(points, gelu, color="black", linewidth=1.0, linestyle=":", label="GELU")
            above.set_ylim(low, high)
            above.set_title(wrap_text(name, 30), fontsize=6)
            finish(above, above is upper[0])
            for index, (key, values) in enumerate(activation.coefficients.items()):
                below.hist(values.float().numpy(), bins=30, histtype="step", label=key,
                           color=COLOURS[index % len(COLOURS)])  # fmt: skip
            finish(below, below is lower[0])
        upper[0].set_ylabel(wrap_text(label, 24), fontsize=8)
        lower[0].set_ylabel("channels", fontsize=8)
    return figure
