"""Convolutional self-attention, LVT's in its first stage: one value matrix per place of a window.

    y = W sum over windows of softmax(W_A m / sqrt d) [V_1 x_1, ..., V_9 x_9]

m is the mean of four tokens of a 3x3 window, from which its 9 x 9 coefficients are read.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809. The host LVT uses this class.

Axes: B images, H W map, C channels, n heads of d channels, h w windows, K = 9 places in a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import ceil_div, is_any_size, missing
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.registry import register_mixer

HEAD_DIM = 32
SIDE, STRIDE = 3, 2  # of the windows
PLACES = [(row, column) for row in range(SIDE) for column in range(SIDE)]


class ConvolutionalSelfAttention(Mixer):
    """Attention within overlapping 3x3 windows, with coefficients from the window's mean.

    Each of the nine places of a window has its own value matrix and its own output. Outputs are
    added where windows overlap.

    Args:
        dim: Channels C.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int, num_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = usual_heads(dim, num_heads, HEAD_DIM)
        self.coefficients = nn.Linear(dim, self.num_heads * len(PLACES) ** 2)
        # Rows k C to (k + 1) C are the value matrix of place k.
        self.values = nn.Conv2d(
            len(PLACES) * dim, len(PLACES) * dim, 1, groups=len(PLACES), bias=False
        )
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Add nine outputs per window where windows overlap: (B, H, W, C) -> (B, H, W, C)."""
        batch, height, width, dim = x.shape
        h, w = ceil_div(height, STRIDE), ceil_div(width, STRIDE)
        # Windows reach over a border, and over one more token if the map ends in mid-stride.
        inside = [
            (
                slice(row, row + STRIDE * h - 1, STRIDE),
                slice(column, column + STRIDE * w - 1, STRIDE),
            )
            for row, column in PLACES
        ]
        padded = F.pad(x, (0, 0, 1, STRIDE * w - width, 1, STRIDE * h - height))
        windows = torch.stack([padded[:, rows, columns] for rows, columns in inside])
        matrices = self.values.weight.view(len(PLACES), dim, dim).transpose(1, 2)
        values = torch.bmm(windows.flatten(1, 3), matrices)
        values = values.view(len(PLACES), -1, h, w, self.num_heads, dim // self.num_heads)
        mixed = self._coefficients(x) @ values.permute(1, 2, 3, 4, 0, 5)  # (B, h, w, n, K, d)

        total = mixed.new_zeros(batch, STRIDE * h + 1, STRIDE * w + 1, *mixed.shape[3::2])
        for place, (rows, columns) in enumerate(inside):
            total[:, rows, columns] += mixed[..., place, :]
        return self.proj(total[:, 1 : height + 1, 1 : width + 1].flatten(3))

    def _coefficients(self, x: Tensor) -> Tensor:
        """Return coefficients from the windows' means: (B, H, W, C) -> (B, h, w, n, K, K)."""
        if is_any_size(x.shape[1:3]):
            # Pooling in ceil_mode branches on the remainder, which a graph would freeze.
            end = (0, 0, 0, missing(x.shape[2], STRIDE), 0, missing(x.shape[1], STRIDE))
            sums, shares = (
                F.avg_pool2d(to_nchw(F.pad(y, end)), STRIDE)
                for y in (x, torch.ones_like(x[:1, :, :, :1]))
            )
            means = to_nhwc(sums / shares)
        else:
            means = to_nhwc(F.avg_pool2d(to_nchw(x), STRIDE, ceil_mode=True))
        logits = self.coefficients(means).unflatten(-1, (self.num_heads, len(PLACES), len(PLACES)))
        scale = (x.shape[-1] // self.num_heads) ** -0.5
        return (logits * scale).softmax(dim=-1)


@register_mixer("csa", kind="token", source="LVT (CVPR 2022)")
def csa(dim: int, *, num_heads: int | None = None) -> ConvolutionalSelfAttention:
    """Build LVT's convolutional self-attention; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 10 C^2 + 81 n (C + 1) + C.

    Source: LVT (CVPR 2022), https://arxiv.org/abs/2112.10809.
    """
    mixer = ConvolutionalSelfAttention(dim, num_heads)
    mixer.apply(init_linear)
    return mixer
