"""A long depthwise kernel along short rows as one batched matrix product.

Kernel k on W places is the W x W band matrix T[i, o] = w[i - o + k // 2]. Processor time of a step
with over without it, forward and backward, on one thread: 0.22 for 64 x 448 rows of 48 places and
kernels of 51.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backbones.fast.base import FastModule
from backbones.layers.row_conv import RowConv

LONGEST = 4  # rows of at most so many kernels, beyond which most of the matrix is zero


class FastRowConv(FastModule, RowConv):  # type: ignore[misc]
    """One product per channel, over all rows of the batch."""

    needs_operators = False

    def serves(self, x: Tensor) -> bool:
        """Return True for rows on a CPU that are short for the kernel."""
        return x.is_cpu and x.shape[-1] <= LONGEST * self.kernel_size[1]

    def compute(self, x: Tensor) -> Tensor:
        """Convolve along rows: (B, C, H, W) -> (B, C, H, W)."""
        batch, channels, height, width = x.shape
        side = self.kernel_size[1]
        places = torch.arange(width)
        taps = places[:, None] - places + side // 2
        inside = (taps >= 0) & (taps < side)
        bands = self.weight[:, 0, 0][:, taps.clamp(0, side - 1)] * inside  # (C, W, W)
        rows = x.permute(1, 0, 2, 3).reshape(channels, batch * height, width)
        y = rows @ bands
        if self.bias is not None:
            y = y + self.bias[:, None, None]
        return y.view(channels, batch, height, width).transpose(0, 1)
