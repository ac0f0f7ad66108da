"""Start of a stage: a strided convolution, then LayerNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nhwc
from backbones.layers.graph_sizes import missing


class PatchEmbed(nn.Module):
    """A convolution with bias and LayerNorm, at any map size.

    Patches that overlap are centred on every ``stride``-th position; others lie side by side, and
    the map is padded with zeros at its right and lower end for the last ones.

    Args:
        in_channels: D.
        dim: C.
        kernel_size: Side of a patch; odd if patches overlap.
        stride: Distance of patches.

    Shape: (B, D, H, W) -> (B, ceil(H / stride), ceil(W / stride), C).
    """

    def __init__(self, in_channels: int, dim: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.overlap = kernel_size > stride
        padding = kernel_size // 2 if self.overlap else 0
        self.proj = nn.Conv2d(in_channels, dim, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return LN(conv(x)), padded to whole patches: (B, D, H, W) -> (B, h, w, C)."""
        if not self.overlap:
            height, width = x.shape[-2:]
            x = F.pad(x, (0, missing(width, self.stride), 0, missing(height, self.stride)))
        return self.norm(to_nhwc(self.proj(x)))
