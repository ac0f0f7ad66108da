"""Conditional positional encoding by a depthwise convolution."""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc


class ConvPosEnc(nn.Conv2d):
    """Conditional positional encoding: x + DW(x) with a depthwise 3x3 convolution DW.

    Zeros around the map tell a token where it is.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: Chu et al., "Conditional Positional Encodings for Vision Transformers", ICLR 2023.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + DW(x): (B, H, W, C) -> (B, H, W, C)."""
        return x + to_nhwc(super().forward(to_nchw(x)))
