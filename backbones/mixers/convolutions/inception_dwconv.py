"""Inception depthwise convolution: three small kernels on a part of the channels, none on the rest.

    y = [x_1, D_kxk x_2, D_1xb x_3, D_bx1 x_4]

Source: Yu et al., "InceptionNeXt: When Inception Meets ConvNeXt", CVPR 2024,
https://arxiv.org/abs/2303.16900; initialisation as in the authors' code.
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


@register_mixer("inception_dwconv", kind="token", source="InceptionNeXt (CVPR 2024)")
class InceptionDepthwise(Mixer):
    """[x_1, D_kxk x_2, D_1xb x_3, D_bx1 x_4]; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        kernel_size: k, side of the square kernel, odd.
        band: b, length of the two band kernels, odd.
        ratio: r, share of the channels that each kernel gets, at most 1/3.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: r C (k^2 + 2 b + 3).

    Raises:
        ValueError: A ratio that gives a kernel no channel, or all kernels more than C.

    Source: InceptionNeXt (CVPR 2024), https://arxiv.org/abs/2303.16900.
    """

    def __init__(
        self, dim: int, *, kernel_size: int = 3, band: int = 11, ratio: float = 0.125
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_odd(band)
        part = int(dim * ratio)
        check_range("ratio * dim", part, 1, dim // 3)
        self.parts = (dim - 3 * part, part, part, part)
        square_padding, band_padding = kernel_size // 2, band // 2
        self.dwconv_hw = nn.Conv2d(part, part, kernel_size, padding=square_padding, groups=part)
        self.dwconv_w = nn.Conv2d(part, part, (1, band), padding=(0, band_padding), groups=part)
        self.dwconv_h = nn.Conv2d(part, part, (band, 1), padding=(band_padding, 0), groups=part)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Convolve three parts of the channels: (B, H, W, C) -> (B, H, W, C)."""
        unmixed, square, row, column = to_nchw(x).split(self.parts, dim=1)
        mixed = (unmixed, self.dwconv_hw(square), self.dwconv_w(row), self.dwconv_h(column))
        return to_nhwc(torch.cat(mixed, dim=1))
