"""Polarity-aware linear attention: products of equal and of opposite signs in separate halves.

    y = W (g * ([A(q~, k~, v_1), A(q^, k~, v_2)] + D v)),  g = W_g x
    q~ = [q+^p, q-^p],  q^ = [q-^p, q+^p],  k~ = [k+^p, k-^p],  p = 1 + a sigmoid(w)
    A(q, k, v) = q (k^T v / N) / (q mean k)

q+ and q- are the positive part of q and of -q, after a division by softplus(s); s is learnt per
channel. k has a table E of positions added. v_1 and v_2 are halves of each head's values, D is a
depthwise 5x5 convolution that all heads share.

Source: Meng et al., "PolaFormer: Polarity-aware Linear Attention for Vision Transformers", ICLR
2025, https://arxiv.org/abs/2501.15061. The paper leaves s and E open; they, a = 4, 64 channels per
head, 1e-6 in the divisor and truncated normal weights of 0.02 are those of the authors' code, which
also reduces keys in some hosts.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_multiple, check_range
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.layers.linear_attention import EPS, divide, mean_keys, sum_products
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.mixers.linear_attention.focused_linear import HEAD_DIM, convolve_heads
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("polaformer", kind="token", source="PolaFormer (ICLR 2025)")
class PolarityAwareLinearAttention(Mixer):
    """W (g * ([A(q~, k~, v_1), A(q^, k~, v_2)] + D v)) with signs of products kept apart.

    The table E belongs to the map size that the host was built for and is interpolated for others.
    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, even.
        grid: Map size (H, W), for the table.
        num_heads: h, a divisor of C / 2; by default as many as leave each 64 channels or more.
        alpha: a, range of the exponents.
        kernel_size: Side of D, odd.
        qkv_bias: Add a bias in the projections of q, g, k and v.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2 + 7 C + 26 d + N C.

    Raises:
        ValueError: Odd C, an even kernel, negative a, or ``num_heads`` that does not divide C / 2.

    Source: PolaFormer (ICLR 2025), https://arxiv.org/abs/2501.15061.
    """

    grid_axes = MappingProxyType({"positional_encoding": "1 N C"})

    def __init__(
        self,
        dim: int,
        *,
        grid: tuple[int, int],
        num_heads: int | None = None,
        alpha: float = 4.0,
        kernel_size: int = 5,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_multiple("dim", dim, 2)
        check_range("alpha", alpha, 0)
        self.num_heads = usual_heads(dim // 2, num_heads, HEAD_DIM // 2)
        self.alpha, width = alpha, dim // self.num_heads
        self.qg = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.dwc = nn.Conv2d(width, width, kernel_size, padding=kernel_size // 2, groups=width)
        self.power = nn.Parameter(torch.zeros(1, self.num_heads, 1, width))
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))
        self.positional_encoding = nn.Parameter(torch.zeros(1, grid[0] * grid[1], dim))
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend by signs, then weigh by g: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        (q, g), (k, v) = (part(tokens).chunk(2, dim=-1) for part in (self.qg, self.kv))
        k = k + self.at_size("positional_encoding", size)
        heads = (split_heads(part, self.num_heads) for part in (q, k, v))
        with without_autocast(x.device):
            mixed = merge_heads(self._attend(*heads)).unflatten(1, size)
        local = convolve_heads(self.dwc, v.unflatten(1, size), self.num_heads)
        return self.proj((mixed + local) * g.unflatten(1, size))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [A(q~, k~, v_1), A(q^, k~, v_2)]: three of (B, h, N, d) -> the same.

        q^ is q~ with its halves exchanged. They are exchanged in what is read instead.
        """
        precision = torch.float32 if v.dtype is torch.float16 else v.dtype  # for fifth powers
        q, k = self._signs(torch.stack([q, k])).to(precision).unbind(0)
        equal_sign, opposite_sign = sum_products(k, v.to(precision)).chunk(2, dim=-1)
        mean, width = mean_keys(k), v.shape[-1]
        exchanged = torch.cat([opposite_sign, mean], dim=-1).roll(width, dims=-2)
        table = [equal_sign, exchanged[..., :-1], mean, exchanged[..., -1:]]
        return divide(q @ torch.cat(table, dim=-1), 2, EPS).to(v.dtype)

    def _signs(self, x: Tensor) -> Tensor:
        """Return [x+^p, x-^p] in float32 at least: (..., B, h, N, d) -> (..., B, h, N, 2 d)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        scale = split_heads(F.softplus(self.scale.to(precise)), self.num_heads)
        scaled = x / scale
        powers = 1 + self.alpha * self.power.to(precise).sigmoid()
        return F.relu(torch.cat([scaled, -scaled], dim=-1)) ** powers.repeat(1, 1, 1, 2)
