"""Focused linear attention: features of queries and keys keep their length and turn to an axis.

    y = W (f(q) (f(k)^T v / N) / (f(q) mean f(k)) + D v)
    f(x) = |u| u^p / |u^p|,  u = (ReLU(x) + 1e-6) / softplus(s),  k = W_k x + E

D is a depthwise 5x5 convolution that all heads share. E is a table of positions, s a scale per
channel; lengths are taken over all heads.

Source: Han et al., "FLatten Transformer: Vision Transformer using Focused Linear Attention", ICCV
2023, https://arxiv.org/abs/2308.00442. The paper leaves s and E open; they, p = 3, 64 channels per
head, 1e-6 and truncated normal weights of 0.02 are those of the authors' code, which also reduces
keys in some hosts.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_positive
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.layers.linear_attention import attend
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer

HEAD_DIM = 64
EPS = 1e-6


def convolve_heads(conv: nn.Module, x: Tensor, heads: int) -> Tensor:
    """Apply one convolution of d channels to each head: (B, H, W, C) -> (B, H, W, C)."""
    maps = to_nchw(x).unflatten(1, (heads, -1))
    return to_nhwc(conv(maps.flatten(0, 1)).unflatten(0, maps.shape[:2]).flatten(1, 2))


@register_mixer("focused_linear", kind="token", source="FLatten Transformer (ICCV 2023)")
class FocusedLinearAttention(Mixer):
    """W (f(q) (f(k)^T v / N) / (f(q) mean f(k)) + D v) with focused features f.

    The table E belongs to the map size that the host was built for and is interpolated for others.
    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        grid: Map size (H, W), for the table.
        num_heads: h, a divisor of C; by default as many as leave each 64 channels or more.
        power: p.
        kernel_size: Side of D, odd.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 5 C + 26 d + N C.

    Raises:
        ValueError: An even kernel, p up to 0, or ``num_heads`` that does not divide C.

    Source: FLatten Transformer (ICCV 2023), https://arxiv.org/abs/2308.00442.
    """

    grid_axes = MappingProxyType({"positional_encoding": "1 N C"})

    def __init__(
        self,
        dim: int,
        *,
        grid: tuple[int, int],
        num_heads: int | None = None,
        power: float = 3.0,
        kernel_size: int = 5,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_positive("power", power)
        self.num_heads, self.power = usual_heads(dim, num_heads, HEAD_DIM), power
        width = dim // self.num_heads
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.dwc = nn.Conv2d(width, width, kernel_size, padding=kernel_size // 2, groups=width)
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))
        self.positional_encoding = nn.Parameter(torch.zeros(1, grid[0] * grid[1], dim))
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend with focused features: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        q, (k, v) = self.q(tokens), self.kv(tokens).chunk(2, dim=-1)
        k = k + self.at_size("positional_encoding", size)
        with without_autocast(x.device):
            features = self._focus(torch.stack([q, k])).to(v.dtype)
            q, k = (split_heads(part, self.num_heads) for part in features.unbind(0))
            mixed = merge_heads(attend(q, k, split_heads(v, self.num_heads)))
        local = convolve_heads(self.dwc, v.unflatten(1, size), self.num_heads)
        return self.proj(mixed.unflatten(1, size) + local)

    def _focus(self, x: Tensor) -> Tensor:
        """Return f(x), in float32 at least: (..., N, C) -> the same."""
        precise = torch.promote_types(x.dtype, torch.float32)
        features = (F.relu(x.to(precise)) + EPS) / F.softplus(self.scale.to(precise))
        powers = features**self.power
        lengths = features.norm(dim=-1, keepdim=True) / powers.norm(dim=-1, keepdim=True)
        return powers * lengths
