"""A 1x1 convolution, which on a map in channels-last memory is a linear layer."""

from __future__ import annotations

import torch
from torch import nn


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` of a 1x1 kernel, as a class of its own for its fast form.

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
