"""Effective receptive field and high-contribution ratios (FFNet Fig. 10, RepLKNet's protocol).

The papers use 50 validation images at 1024x1024 (images=50 image_size=1024, the defaults). The
field is the positive part of the gradient of the last map's centre, before any norm. It is summed
over colours and averaged over images. r(t) is the area, relative to the image, of the smallest
centred square with more than t of log10(score + 1); "-" if no square inside the image has it. Batch
norms use their statistics; smaller images are enlarged (bicubic).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import hide_axes, new_figure, wrap_text
from tools.plotting.colours import colour_bar

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"images": "50", "image_size": "1024"}  # overrides the command's defaults
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "size": ("image", "{}"),
    "images": ("images", "{}"),
    "r20": ("r(20%)", "{:.4f}"),
    "r30": ("r(30%)", "{:.4f}"),
    "r50": ("r(50%)", "{:.4f}"),
    "r99": ("r(99%)", "{:.4f}"),
}
DRAWN = 128  # maximum pixels per side of the figure, each the maximum of an area


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Measure the receptive field of each network; maps are drawn side by side on one scale."""
    import torch.nn.functional as F

    from backbones.analysis.receptive_field import high_contribution, log_scores, receptive_field

    figure, axes = new_figure(1, len(subjects), 3.4, 3.6)
    summary, rows = [], []
    for axis, subject in zip(axes[0], subjects, strict=True):
        # Large images one by one, since a batch may not fit into memory.
        batches = [image[None] for batch in subject.batches() for image in batch.images]
        field = receptive_field(subject.backbone, batches)
        height, width = field.shape
        record: dict[str, Any] = {
            "backbone": subject.label, "size": f"{height}x{width}", "images": len(batches)
        }  # fmt: skip
        for square in high_contribution(field):
            record[f"r{round(100 * square.threshold)}"] = square.ratio
            record[f"side{round(100 * square.threshold)}"] = square.side
        summary.append(record)
        scores = log_scores(field)[None, None]
        picture = F.adaptive_max_pool2d(scores, (min(height, DRAWN), min(width, DRAWN)))[0, 0]
        image = axis.imshow(
            picture.sqrt(), cmap="viridis", vmin=0, vmax=1, extent=(0, width, height, 0)
        )
        axis.set_title(
            f"{wrap_text(subject.label, 30)}\nr(50%) = {_ratio(record['r50'])}", fontsize=9
        )
        hide_axes(axis)
        rows.append(record)
    colour_bar(figure, image, list(axes[0]), "root of the score")
    return Findings(rows, summary, COLUMNS, {"erf": figure})


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
