"""Patch embedding and merging of PosMLP, overlapping (ConvPE, ConvPM) or linear.

All work on (B, C, H, W), best in channels_last memory.

Source: Wang et al., PosMLP, MM 2022, Sec. 4.2, Fig. 2b and 2c; Table 10 for the linear ones; the
authors' released code for kernel sizes, norms and initialisation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, trunc_normal_
from torch import Tensor, nn

EPS = 1e-6  # of every norm, except after linear layers

Norm = Literal["bn", "ln"]
Merge = Literal["conv", "full_conv", "linear"]


class ConvEmbed(nn.Module):
    """ConvPE: convolutions of 3x3 and 3x3 with stride 2 and 1x1, each with a norm, GELU between.

    Shape: (B, 3, H, W) -> (B, C, ceil(H / 4), ceil(W / 4)).

    Source: PosMLP, Fig. 2b.
    """

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        half = width // 2
        self.projs = nn.ModuleList(
            [
                _conv(3, half, 3, stride=2, padding=1),
                _conv(half, width, 3, stride=2, padding=1),
                _conv(width, width, 1),
            ]
        )
        self.norms = nn.ModuleList(_norm(norm, channels) for channels in (half, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Embed images by three convolutions: (B, 3, H, W) -> (B, C, h, w)."""
        for index, (proj, norm) in enumerate(zip(self.projs, self.norms, strict=True)):
            x = norm(proj(F.gelu(x) if index else x))
        return x


class LinearEmbed(nn.Module):
    """PE-linear of Table 10: a projection of 4x4 pixels and a LayerNorm.

    Args:
        width: Channels C.
        side: Of the patches, 4 in the paper.

    Shape: (B, 3, H, W) -> (B, C, ceil(H / side), ceil(W / side)).
    """

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.proj = _conv(3, width, side, stride=side)
        self.norm = LayerNorm2d(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Project and norm patches: (B, 3, H, W) -> (B, C, h, w)."""
        x = F.pad(x, (0, -x.shape[3] % self.side, 0, -x.shape[2] % self.side))
        return self.norm(self.proj(x))


class ConvMerge(nn.Module):
    """ConvPM: a 3x3 convolution of stride 2 and a norm; depthwise except for ``full_conv``.

    Shape: (B, C, H, W) -> (B, 2 C, ceil(H / 2), ceil(W / 2)).

    Source: PosMLP, Fig. 2c.
    """

    def __init__(self, width: int, groups: int, norm: Norm) -> None:
        super().__init__()
        self.conv = _conv(width, 2 * width, 3, stride=2, padding=1, groups=groups)
        self.norm = _norm(norm, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution and the norm: (B, C, H, W) -> (B, 2 C, h, w)."""
        return self.norm(self.conv(x))


class LinearMerge(nn.Module):
    """PM-linear of Table 10, Swin's: four neighbours, LayerNorm, a projection without bias.

    Shape: (B, C, H, W) -> (B, 2 C, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(4 * width, eps=1e-5)
        self.conv = _conv(4 * width, 2 * width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate, norm and project four neighbours: (B, C, H, W) -> (B, 2 C, h, w)."""
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        corners = [x[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.conv(self.norm(torch.cat(corners, dim=1)))


def downsample(width: int, merge: Merge, norm: Norm) -> nn.Module:
    """Build the downsampling after a stage of ``width`` channels."""
    if merge == "linear":
        return LinearMerge(width)
    return ConvMerge(width, width if merge == "conv" else 1, norm)


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=EPS) if kind == "bn" else LayerNorm2d(channels, eps=EPS)


def _conv(channels: int, width: int, kernel_size: int, **options: Any) -> nn.Conv2d:
    """Build a convolution with the authors' initialisation."""
    conv = nn.Conv2d(channels, width, kernel_size, **options)
    trunc_normal_(conv.weight, std=0.02)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
