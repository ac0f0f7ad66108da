"""Inverted separable convolution, the token mixer of ConvFormer.

    y = W2 D(StarReLU(W1 x)),  D a depthwise convolution

Source: Yu et al., "MetaFormer Baselines for Vision", TPAMI 2024, https://arxiv.org/abs/2210.13452;
after MobileNetV2, https://arxiv.org/abs/1801.04381. No layer has a bias, and all weights start
truncated normal of 0.02, as in the authors' code.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.activations import StarReLU
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_all
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("sep_conv", kind="token", source="MetaFormer baselines (2022)")
class SepConv(Mixer):
    """W2 D(StarReLU(W1 x)). Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        expansion: e, width of the convolution over C.
        kernel_size: k, side of the convolution, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 e C^2 + e k^2 C + 2.

    Source: MetaFormer baselines (2022), https://arxiv.org/abs/2210.13452.
    """

    def __init__(self, dim: int, *, expansion: int = 2, kernel_size: int = 7) -> None:
        super().__init__()
        check_odd(kernel_size)
        hidden, side = expansion * dim, kernel_size
        self.pwconv1 = nn.Linear(dim, hidden, bias=False)
        self.act = StarReLU()
        self.dwconv = nn.Conv2d(hidden, hidden, side, padding=side // 2, groups=hidden, bias=False)
        self.pwconv2 = nn.Linear(hidden, dim, bias=False)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 D(StarReLU(W1 x)): (B, H, W, C) -> (B, H, W, C)."""
        hidden = self.act(self.pwconv1(x))
        return self.pwconv2(to_nhwc(self.dwconv(to_nchw(hidden))))
