"""Feature entropy of blocks: evenness of the values of a map over their range.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Table 18, without
definition. Here: Shannon's entropy in bits of a histogram of 256 equal bins between the least and
the greatest value of the block's map, per image, and the mean over images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.analysis.capturing import block_maps
from backbones.base import Backbone
from backbones.layers.bounds import check_range

BINS = 256


def map_entropy(maps: Tensor, bins: int = BINS) -> Tensor:
    """Return the entropy in bits of each image's values: (B, ...) -> (B,) in float64.

    Raises:
        ValueError: Values are NaN or infinite, or bins below 1.
    """
    check_range("bins", bins, 1)
    values = maps.detach().flatten(1).double()
    if not values.isfinite().all():
        raise ValueError("entropy needs finite features, got NaN or infinite values")
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
    """Return the entropy in bits of each block's output per image, (B,) by the block's name.

    Args:
        backbone: Backbone of any host.
        images: (B, 3, H, W).
        blocks: See ``choose_blocks``; all by default.
        bins: Number of bins of the histogram.
    """
    maps = block_maps(backbone, images, blocks)
    return {name: map_entropy(map_, bins) for name, map_ in maps.items()}
