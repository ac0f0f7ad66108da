"""Effective receptive field: contributions of pixels to the middle of the last map.

Source: RepLKNet (Ding et al., CVPR 2022, https://arxiv.org/abs/2203.06717), App. B and its released
code, which FFNet (https://arxiv.org/abs/2406.02021), App. D and Fig. 10, follows: per image the
gradient of the sum over channels of relu(feature) at the middle of the last map, before any final
norm; its positive part, summed over the colours; the mean over images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backbones.analysis.capturing import evaluating, watch
from backbones.base import Backbone

THRESHOLDS = (0.2, 0.3, 0.5, 0.99)


@dataclass(frozen=True)
class HighContribution:
    """Smallest centred square with more than a share of the contributions.

    Attributes:
        threshold: The share.
        side: Side of the square in pixels; None if it exceeds the image.
        ratio: Its area over the image's.
    """

    threshold: float
    side: int | None
    ratio: float | None


def contributions(backbone: Backbone, images: Tensor) -> Tensor:
    """Return the contributions of pixels to the middle of the last map: (B, 3, H, W) -> (B, H, W).

    The network runs in evaluation mode; gradients of its parameters are unchanged.
    """
    last = backbone.block_names()[-1]
    images = images.detach().clone().requires_grad_()
    with evaluating(backbone), torch.enable_grad(), watch(backbone, [last]) as calls:
        backbone(images)
        call = calls[last][0]
        features = backbone.block_map(call.output, *call.inputs)
        row, column = features.shape[2] // 2, features.shape[3] // 2
        score = features[:, :, row, column].relu().sum()
        (gradient,) = torch.autograd.grad(score, images)
    return gradient.relu().sum(1)


def receptive_field(backbone: Backbone, batches: Sequence[Tensor]) -> Tensor:
    """Return the mean of ``contributions`` over images without NaN: (H, W).

    Args:
        backbone: Backbone of any host.
        batches: Batches of images (B, 3, H, W), all of one size.

    Raises:
        ValueError: Images of several sizes, or all with NaN.
    """
    sizes = {tuple(images.shape[2:]) for images in batches}
    if len(sizes) != 1:
        raise ValueError(f"a receptive field needs images of one size, got {sorted(sizes)}")
    total, count = torch.zeros(()), 0
    for images in batches:
        shares = contributions(backbone, images)
        finite = shares[shares.isfinite().flatten(1).all(1)]
        total, count = total.to(finite) + finite.sum(0), count + len(finite)
    if not count:
        raise ValueError("the contributions of all images are NaN or infinite")
    return total / count


def high_contribution(
    field: Tensor, thresholds: Sequence[float] = THRESHOLDS
) -> list[HighContribution]:
    """Return the smallest centred squares with more than given shares of a field.

    Shares are those of A = log10(field + 1) / max, as in RepLKNet's code; without the logarithm the
    squares differ.

    Args:
        field: (H, W) from ``receptive_field``.
        thresholds: Shares.
    """
    scores = log_scores(field)
    height, width = scores.shape
    row, column, total = height // 2, width // 2, float(scores.sum())
    areas = []
    for threshold in thresholds:
        side = None
        for reach in range(1, height // 2):
            rows = slice(row - reach, row + 1 + reach)
            square = scores[rows, max(0, column - reach) : column + 1 + reach]
            if total > 0 and float(square.sum()) / total > threshold:
                side = 2 * reach + 1
                break
        ratio = None if side is None else side / height * side / width
        areas.append(HighContribution(threshold, side, ratio))
    return areas


def log_scores(field: Tensor) -> Tensor:
    """Return log10(field + 1) over its maximum, (H, W) in float64; zeros stay zeros."""
    scores = (field.detach().double() + 1).log10()
    greatest = scores.max()
    return scores / greatest if greatest > 0 else scores
