"""Partial convolution: a dense convolution of the first channels, which leaves the others alone.

    y = [K x_1, x_2],  x_1 the first C / n channels

Source: Chen et al., "Run, Don't Walk: Chasing Higher FLOPS for Faster Neural Networks" (FasterNet),
CVPR 2023, https://arxiv.org/abs/2303.03667, Sec. 3.2; without bias and with truncated normal
weights of 0.02, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.init import init_all
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("partial_conv", kind="token", source="FasterNet (CVPR 2023), Sec. 3.2")
class PartialConv(Mixer):
    """[K x_1, x_2]; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        divisor: n; one of n channels is convolved.
        kernel_size: k, side of K, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: (k C / n)^2.

    Raises:
        ValueError: A divisor below 1 or above C.

    Source: FasterNet (CVPR 2023), Sec. 3.2, https://arxiv.org/abs/2303.03667.
    """

    def __init__(self, dim: int, *, divisor: int = 4, kernel_size: int = 3) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_range("divisor", divisor, 1, dim)
        part = dim // divisor
        self.parts = (part, dim - part)
        self.conv = nn.Conv2d(part, part, kernel_size, padding=kernel_size // 2, bias=False)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return [K x_1, x_2]: (B, H, W, C) -> (B, H, W, C)."""
        inputs, unmixed = x.split(self.parts, dim=-1)
        return torch.cat([to_nhwc(self.conv(to_nchw(inputs))), unmixed], dim=-1)
