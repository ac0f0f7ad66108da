"""Spatial models, all of stride 1: (B, H, W, C) -> (B, H, W, C) at any H and W.

AFBO (Wu et al., ICLR 2025) compares them in Tables 8 (kinds), 9 (kernel sizes) and 10 (depthwise
against full convolution). Maps are viewed as channels_last memory, which spares both copies.

Axes: B images, H W map, C channels, k side of the kernel.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.pooling import NeighbourMean
from backbones.options import check_odd

SpatialName = Literal["dw", "max", "avg", "sa", "conv", "none"]


def create_spatial_model(
    name: SpatialName, channels: int, kernel_size: int, bias: bool = True
) -> nn.Module:
    """Build one spatial model.

    Args:
        name: "dw" depthwise convolution, "max" or "avg" pooling, "sa" spatial attention, "conv"
            full convolution, "none".
        channels: C.
        kernel_size: k, odd; spatial attention has its own.
        bias: Add a bias in the convolution.

    Raises:
        ValueError: An even kernel.
    """
    check_odd(kernel_size)
    if name == "dw":
        return SameConv(channels, kernel_size, groups=channels, bias=bias)
    if name == "conv":
        return SameConv(channels, kernel_size, bias=bias)
    if name == "sa":
        return SpatialAttention()
    return {"max": MaxPool, "avg": AveragePool}[name](kernel_size) if name != "none" else Nothing()


class SameConv(nn.Conv2d):
    """Convolution with k // 2 zeros around the map; depthwise if there are as many groups."""

    def __init__(self, channels: int, kernel_size: int, groups: int = 1, bias: bool = True) -> None:
        padding = kernel_size // 2
        super().__init__(channels, channels, kernel_size, 1, padding, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with a border of zeros: (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(super().forward(to_nchw(x)))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Set the centre tap to 1 on the diagonal plus a truncated normal of 0.02, biases to 0."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        row, column = (side // 2 for side in self.kernel_size)
        if self.groups == self.in_channels:
            self.weight[:, :, row, column] += 1
        else:
            self.weight[:, :, row, column].diagonal().add_(1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class MaxPool(nn.Module):
    """Largest of the k x k neighbours inside the map, per channel."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest neighbour of each position: (B, H, W, C) -> (B, H, W, C)."""
        size = self.kernel_size
        return to_nhwc(F.max_pool2d(to_nchw(x), size, stride=1, padding=size // 2))


class AveragePool(nn.Module):
    """Mean of the k x k neighbours inside the map, per channel; padding does not count.

    The paper does not say whether it counts.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.pool = NeighbourMean(kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean neighbour of each position: (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self.pool(to_nchw(x)))


class SpatialAttention(nn.Module):
    """x * sigmoid(conv7x7([max over channels; mean over channels])), without bias and norm.

    Source: Woo et al., "CBAM", ECCV 2018, Sec. 3.2, as AFBO's App. A.2 suggests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the map with a gate per position: (B, H, W, C) -> (B, H, W, C)."""
        statistics = torch.stack([x.amax(-1), x.mean(-1)], dim=1)
        return x * to_nhwc(self.conv(statistics)).sigmoid()


class Nothing(nn.Identity):
    """No spatial model: tokens do not meet."""
