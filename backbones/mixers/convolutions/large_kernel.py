"""Large kernel attention: a map of factors from a decomposed 21x21 convolution.

    y = W2 (u * V D2 D1 u) + x,  u = GELU(W1 x)

D1 is a depthwise 5x5 convolution, D2 a depthwise 7x7 one of dilation 3, V a 1x1 convolution.

Source: Guo et al., "Visual Attention Network", CVMJ 2023, https://arxiv.org/abs/2202.09741. The
shortcut inside the mixer is that of the authors' code; the host adds its own. Convolutions start by
their fan-out, as there.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_fan_out
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("large_kernel", kind="token", source="VAN (2022)")
class LargeKernelAttention(Mixer):
    """W2 (u * V D2 D1 u) + x; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 C^2 + 79 C.

    Source: VAN (2022), https://arxiv.org/abs/2202.09741.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj_1 = PointwiseConv2d(dim, dim)
        self.conv0 = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.conv_spatial = nn.Conv2d(dim, dim, 7, padding=9, dilation=3, groups=dim)
        self.conv1 = PointwiseConv2d(dim, dim)
        self.proj_2 = PointwiseConv2d(dim, dim)
        init_fan_out(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 (u * V D2 D1 u) + x: (B, H, W, C) -> (B, H, W, C)."""
        u = F.gelu(self.proj_1(to_nchw(x)))
        attention = self.conv1(self.conv_spatial(self.conv0(u)))
        return to_nhwc(self.proj_2(u * attention)) + x
