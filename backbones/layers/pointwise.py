"""A 1x1 convolution, which on a map in channels-last memory is a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.linear import faster_linear


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` of a 1x1 kernel, by whoever multiplies matrices the fastest here.

    torch sends a single image through a BLAS, of which a linear layer has a faster one on some
    processors; see ``layers/linear``.

    Shape: (B, D, H, W) -> (B, O, H, W), or as ``nn.Conv2d`` without B.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, 1, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b at every position: (B, D, H, W) -> (B, O, H, W)."""
        product = faster_linear(x, self.weight) if x.ndim == 4 else None
        nhwc = x.movedim(1, -1)
        if product is None or not nhwc.is_contiguous():
            return super().forward(x)
        return product(nhwc, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
