"""Attentions of LVT: convolutional in the first stage, recursive and atrous in the others.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809.

Axes: B images, H W map, C channels, n heads of 32 channels, h w windows, K = 9 places in a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import ceil_div, is_any_size, missing
from backbones.mixers.metamixer.query_key_value import split_heads

HEAD_DIM = 32
SIDE, STRIDE = 3, 2  # windows of CSA
PLACES = [(row, column) for row in range(SIDE) for column in range(SIDE)]
DILATIONS = (1, 3, 5)


class ConvolutionalSelfAttention(Mixer):
    """Attention within overlapping 3x3 windows, with coefficients from the window's mean.

    Each of the nine places of a window has its own value matrix and its own output. Outputs are
    added where windows overlap.

    Args:
        dim: C, a multiple of 32.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_DIM
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
        values = values.view(len(PLACES), -1, h, w, self.num_heads, HEAD_DIM)
        mixed = self._coefficients(x) @ values.permute(1, 2, 3, 4, 0, 5)  # (B, h, w, n, K, 32)

        total = mixed.new_zeros(batch, STRIDE * h + 1, STRIDE * w + 1, self.num_heads, HEAD_DIM)
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
        return (logits * HEAD_DIM**-0.5).softmax(dim=-1)


class RecursiveAtrousSelfAttention(Mixer):
    """Global attention with queries from several dilations, applied again to its own output.

    With attention A, out_1 = SiLU(A(x)) and acc_1 = x, every further step has
    acc_t = acc_{t-1} + out_{t-1} and out_t = SiLU(A(acc_t)), all with the same weights. A single
    step is A(x) itself, without SiLU.

    Args:
        dim: C, a multiple of 32.
        reduction: Factor by which the map of keys and values is smaller.
        steps: Recursion count r.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int, reduction: int, steps: int) -> None:
        super().__init__()
        self.num_heads, self.steps = dim // HEAD_DIM, steps
        self.q = nn.Linear(dim, dim, bias=False)
        self.atrous = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.reduce, self.norm = None, None
        if reduction > 1:
            self.reduce = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Apply attention ``steps`` times: (B, H, W, C) -> (B, H, W, C)."""
        out = self.attend(x)
        if self.steps == 1:
            return out
        for _ in range(self.steps - 1):
            x = x + F.silu(out)
            out = self.attend(x)
        return F.silu(out)

    def attend(self, x: Tensor) -> Tensor:
        """Return A(x): (B, H, W, C) -> (B, H, W, C)."""
        size = x.shape[1:3]
        q = split_heads(self._queries(x).flatten(1, 2), self.num_heads)
        if self.reduce is not None and self.norm is not None:
            x = self.norm(to_nhwc(self.reduce(to_nchw(x))))
        k, v = self.kv(x.flatten(1, 2)).chunk(2, dim=-1)
        k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2)).unflatten(1, size)

    def _queries(self, x: Tensor) -> Tensor:
        """Sum a depthwise convolution's outputs at three dilations, each after SiLU."""
        q, weight = to_nchw(self.q(x)), self.atrous.weight
        scales = [
            F.silu(F.conv2d(q, weight, padding=d, dilation=d, groups=len(weight)))
            for d in DILATIONS
        ]
        return to_nhwc(scales[0] + scales[1] + scales[2])


class ClassAttention(nn.Module):
    """Attention of the class token to itself and all other tokens.

    Shape: (B, 1 + N, C), the class token first, -> (B, 1, C).

    Source: CaiT (ICCV 2021), https://arxiv.org/abs/2103.17239.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_DIM
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend from the class token to all tokens: (B, 1 + N, C) -> (B, 1, C)."""
        q = split_heads(self.q(tokens[:, :1]), self.num_heads)
        k, v = self.kv(tokens).chunk(2, dim=-1)
        k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))
