"""Attention within overlapping windows, with zeros around the map; outputs are added.

Windows of odd side s begin at every t-th token, so that they cover all tokens if t <= (s + 1) / 2.

Axes: B images, H W map, C channels, n heads of d channels, h w windows, K = s^2 places in a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import ceil_div
from backbones.layers.pooling import avg_pool2d


def gather(x: Tensor, side: int, stride: int) -> Tensor:
    """Return the tokens of each window: (B, H, W, C) -> (K, B, h, w, C)."""
    height, width = x.shape[1:3]
    h, w = ceil_div(height, stride), ceil_div(width, stride)
    before, after = side // 2, side - side // 2 - stride
    # Windows reach over a border, and over one more token if the map ends in mid-stride.
    end = [stride * count + after - length for count, length in ((w, width), (h, height))]
    padded = F.pad(x, (0, 0, before, end[0], before, end[1]))
    down, right = (
        [slice(place, place + stride * (count - 1) + 1, stride) for place in range(side)]
        for count in (h, w)
    )
    # Rows first and columns of those: six slices, and gradients of six, instead of nine.
    rows = torch.stack([padded[:, part] for part in down])
    return torch.stack([rows[:, :, :, part] for part in right], dim=1).flatten(0, 1)


def window_means(x: Tensor, stride: int) -> Tensor:
    """Return means of t x t tokens, of fewer at the end: (B, H, W, C) -> (B, h, w, C)."""
    sides = (stride, stride)
    return to_nhwc(avg_pool2d(to_nchw(x), sides, sides, ceil_mode=True))


def attend(coefficients: Tensor, values: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """Mix the values of each window, and add the results where windows overlap.

    Args:
        coefficients: (B, h, w, n, K, K), rows for outputs.
        values: (K, B, h, w, C) as ``gather`` has them.
        size: (H, W) of the map.
        stride: t.

    Returns:
        (B, H, W, C).
    """
    heads, count = coefficients.shape[3:5]
    mixed = coefficients @ values.unflatten(-1, (heads, -1)).permute(1, 2, 3, 4, 0, 5)
    # (B, h, w, n, K, d) -> (B, n d K, h w), the order of torch's fold.
    columns = mixed.permute(0, 3, 5, 4, 1, 2).flatten(4).flatten(1, 3)
    side = round(count**0.5)
    return to_nhwc(F.fold(columns, size, side, padding=side // 2, stride=stride))
