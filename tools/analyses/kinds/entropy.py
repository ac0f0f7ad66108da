"""Feature entropy of every block, as a curve (AFBO Table 18).

The entropy in bits of a 256-bin histogram between the minimum and maximum of a block's values, per
image, averaged over images. The paper does not define its entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.analyses import Findings
from tools.analyses.figures import curves
from tools.cli.arguments import parse_integer

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"bins": "256"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "block": ("block", "{}"),
    "layer": ("module", "{}"),
    "entropy": ("entropy bits", "{:.3f}"),
    "deviation": ("+- over images", "{:.3f}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Measure the entropy of each block of each network."""
    import torch

    from backbones.analysis.entropy import feature_entropy

    bins = parse_integer("bins", options["bins"])
    rows, lines = [], {}
    for subject in subjects:
        parts = [
            feature_entropy(subject.backbone, batch.images, bins=bins)
            for batch in subject.batches()
        ]
        values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        lines[subject.label] = [float(value.mean()) for value in values.values()]
        rows += [
            {
                "backbone": subject.label,
                "block": block,
                "layer": name,
                "entropy": float(value.mean()),
                "deviation": float(value.std(correction=0)),
                "images": len(value),
            }
            for block, (name, value) in enumerate(values.items(), start=1)
        ]
    figure = curves(lines, "Feature entropy", "bits")
    return Findings(rows, rows, COLUMNS, {"entropy": figure})
