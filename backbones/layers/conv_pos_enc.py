"""A positional encoding by whoever computes it the fastest here; alone in a file that is torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc

Encoding = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Whom to ask before torch, as in ``layers/linear``.
FASTER: list[tuple[Callable[[Tensor, Tensor, Tensor | None], bool], Encoding]] = []


class ConvPosEnc(nn.Conv2d):
    """Conditional positional encoding: x + DW(x) with a depthwise 3x3 convolution DW.

    Zeros around the map tell a token where it is.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: Chu et al., "Conditional Positional Encodings for Vision Transformers", ICLR 2023.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        """The map and what its neighbourhoods add: (B, H, W, C) -> (B, H, W, C)."""
        for serves, encode in FASTER:
            if serves(x, self.weight, self.bias):
                return encode(x, self.weight, self.bias)
        return x + to_nhwc(super().forward(to_nchw(x)))
