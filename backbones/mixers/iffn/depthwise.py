"""Depthwise block between IFFN's two linear layers: Sec. 4.3 and Table 6."""

from __future__ import annotations

from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.norms import normalise
from backbones.options import check_odd

Order = Literal["bn_act", "act_bn"]
Residual = bool | Literal["outside"]


class DepthwiseBlock(nn.Module):
    """GELU(BN(DW(t))), zeros around the map.

    Args:
        channels: h.
        kernel_size: k, odd.
        residual: True for BN of DW(t) + t, "outside" for t + GELU(BN(DW(t))).
        order: "bn_act", or "act_bn" for BN(GELU(DW(t))).
        init: "torch" for its usual draw, as released, or "he", see ``reset_parameters``.

    Shape: (B, H, W, h) -> (B, H, W, h). Parameters: h k^2 + 3 h.

    Source: IFFN (ICML 2024), Sec. 4.3, "DW Conv with BN and GeLU".
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        residual: Residual = False,
        order: Order = "bn_act",
        init: Literal["torch", "he"] = "he",
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        self.residual, self.shortcut = residual is True, residual == "outside"
        self.order = order
        self.conv = nn.Conv2d(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels
        )
        self.bn = nn.BatchNorm1d(channels)
        if init == "he":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a normal of variance 2 / k^2, He's rule for a channel's fan out; zero biases."""
        nn.init.normal_(self.conv.weight, std=(2 / self.conv.kernel_size[0] ** 2) ** 0.5)
        nn.init.zeros_(cast("Tensor", self.conv.bias))

    def forward(self, t: Tensor) -> Tensor:
        """Return GELU(BN(DW(t))) or BN(GELU(DW(t))), perhaps plus t: (B, H, W, h) -> the same."""
        u = to_nhwc(self.conv(to_nchw(t)))  # a view as channels_last memory spares both copies
        if self.residual:
            u = u + t
        if self.order == "bn_act":
            u = F.gelu(normalise(u, self.bn))
        else:
            u = normalise(F.gelu(u), self.bn)
        return t + u if self.shortcut else u
