"""Multi-order gated aggregation: a gate times depthwise convolutions of three receptive fields.

    z = SiLU(p + s * (p - mean p)),  p = W1 x
    y = W4 (SiLU(W2 z) * SiLU(W3 [a_0, D1 a_1, D2 a_2])) + x,  a = D0 z

The mean is over the map, s a factor per channel. D0 is a depthwise 5x5 convolution, D1 a 5x5 one of
dilation 2 on 3/8 of the channels, D2 a 7x7 one of dilation 3 on half of them.

Source: Li et al., "MogaNet: Multi-order Gated Aggregation Network", ICLR 2024,
https://arxiv.org/abs/2211.03295. The shortcut inside the mixer is that of the authors' code; the
host adds its own. Convolutions start by their fan-out and s at 1e-5, as there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_fan_out
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("moga", kind="token", source="MogaNet (ICLR 2024)")
class MultiOrderGatedAggregation(Mixer):
    """W4 (SiLU(gate) * SiLU(context)) + x; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, at least 4.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 65.75 C, at multiples
    of 8.

    Source: MogaNet (ICLR 2024), https://arxiv.org/abs/2211.03295.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        middle, far = 3 * dim // 8, dim // 2
        self.parts = (dim - middle - far, middle, far)
        self.proj_1, self.proj_2 = PointwiseConv2d(dim, dim), PointwiseConv2d(dim, dim)
        self.gate = PointwiseConv2d(dim, dim)
        self.conv0 = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.conv1 = nn.Conv2d(middle, middle, 5, padding=4, dilation=2, groups=middle)
        self.conv2 = nn.Conv2d(far, far, 7, padding=9, dilation=3, groups=far)
        self.context = PointwiseConv2d(dim, dim)
        self.sigma = nn.Parameter(torch.full((dim, 1, 1), 1e-5))
        init_fan_out(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W4 (SiLU(gate) * SiLU(context)) + x: (B, H, W, C) -> (B, H, W, C)."""
        p = self.proj_1(to_nchw(x))
        z = F.silu(p + self.sigma * (p - p.mean((2, 3), keepdim=True)))
        near, middle, far = self.conv0(z).split(self.parts, dim=1)
        context = self.context(torch.cat([near, self.conv1(middle), self.conv2(far)], dim=1))
        return to_nhwc(self.proj_2(F.silu(self.gate(z)) * F.silu(context))) + x
