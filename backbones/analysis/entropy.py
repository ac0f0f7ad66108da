"""Feature entropy of blocks: how evenly the values of a map spread over their range.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Table 18, which
does not define it. Here: of each image a histogram of 256 equal bins between the least and the
greatest value of the block's map, Shannon's entropy of it in bits, and the mean over images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.analysis.capturing import block_maps
from backbones.base import Backbone

BINS = 256


def map_entropy(maps: Tensor, bins: int = BINS) -> Tensor:
    """Entropy in bits of each image's values: (B, ...) -> (B,), in float64; 0 where all are equal.

    Raises:
        ValueError: Values that are not finite, or fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    values = maps.detach().flatten(1).double()
    if not values.isfinite().all():
        raise ValueError("the features have NaN or infinite values, so that their entropy is none")
    least = values.amin(1, keepdim=True)
    width = values.amax(1, keepdim=True) - least
    places = (values - least) / torch.where(width > 0, width, torch.ones_like(width)) * bins
    counts = torch.zeros(len(values), bins, dtype=values.dtype, device=values.device)
    index = places.long().clamp(max=bins - 1)
    counts.scatter_add_(1, index, torch.ones_like(values))
    shares = counts / values.shape[1]
    return -torch.special.xlogy(shares, shares).sum(1) / torch.log(shares.new_tensor(2.0))


def feature_entropy(
    backbone: Backbone, images: Tensor, blocks: Sequence[str] | None = None, bins: int = BINS
) -> dict[str, Tensor]:
    """Entropy in bits of what each block gives for each image, (B,) by the block's name.

    Args:
        backbone: Of any host.
        images: (B, 3, H, W).
        blocks: See ``choose_blocks``; all by default.
        bins: Of the histogram.
    """
    maps = block_maps(backbone, images, blocks)
    return {name: map_entropy(map_, bins) for name, map_ in maps.items()}
