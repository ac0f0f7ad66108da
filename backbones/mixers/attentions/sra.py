"""Spatial-reduction attention: all tokens attend to the keys of a smaller map.

    y = W softmax(q k^T / sqrt d) v,  (k, v) = W_kv LN(R x)

R is a convolution of side and stride s. The linear form pools to a fixed map instead:
(k, v) = W_kv GELU(LN(W_r pool(x))).

Source: Wang et al., "Pyramid Vision Transformer", ICCV 2021, https://arxiv.org/abs/2102.12122; "PVT
v2", CVMJ 2022, https://arxiv.org/abs/2106.13797 (linear form). Reductions, channels per head and
initialisation are those of the authors' code, which also omits rows and columns that do not fill a
window.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import adaptive_avg_pool, whole_window
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_fan_out
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 64
REDUCTIONS = (8, 4, 2, 1)  # by stage


class ReducedKeys(nn.Module):
    """The tokens of a reduced map, normed: (B, H, W, C) -> (B, M, C); with s = 1 all tokens.

    Args:
        dim: Channels C.
        reduction: s.
        pool: Side of a pooled map in the place of the reduced one; None reduces by s.
    """

    def __init__(self, dim: int, reduction: int, pool: int | None = None) -> None:
        super().__init__()
        self.pool = pool
        side = reduction if pool is None else 1
        self.sr: nn.Conv2d | None = None
        self.norm: nn.LayerNorm | None = None
        if reduction > 1 or pool is not None:
            self.sr, self.norm = nn.Conv2d(dim, dim, side, side), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of the reduced map: (B, H, W, C) -> (B, M, C)."""
        if self.sr is None or self.norm is None:
            return x.flatten(1, 2)
        maps = to_nchw(x)
        if self.pool is not None:
            tokens = self.norm(
                self.sr(adaptive_avg_pool(maps, (self.pool, self.pool))).flatten(2).mT
            )
            return F.gelu(tokens)
        return self.norm(self.sr(whole_window(maps, self.sr.kernel_size)).flatten(2).mT)


class SpatialReductionAttention(Mixer):
    """Attention of all tokens to those of a reduced map.

    Prefix tokens are queries as the map's tokens are, and keys beside those of the reduced map.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C.
        reduction: s.
        pool: Side of a pooled map in the place of the reduced one; None reduces by s.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size.
    """

    prefix_mixing = "joint"

    def __init__(self, dim: int, num_heads: int, reduction: int, pool: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.reduce = ReducedKeys(dim, reduction, pool)
        self.proj = nn.Linear(dim, dim)
        init_fan_out(self)

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to prefix tokens and the reduced map: (B, H, W, C) and (B, P, C) -> both."""
        tokens = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        keys = torch.cat([prefix, self.reduce(x)], dim=1)
        q, k, v = (
            split_heads(part, self.num_heads)
            for part in (self.q(tokens), *self.kv(keys).chunk(2, dim=-1))
        )
        mixed = self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        count = prefix.shape[1]
        return mixed[:, count:].unflatten(1, x.shape[1:3]), mixed[:, :count]


@register_mixer("sra", kind="token", source="PVT (ICCV 2021); PVT v2 (2022)")
def sra(
    dim: int,
    *,
    slot: Slot | None = None,
    reduction: int | None = None,
    linear: bool = False,
    pool: int = 7,
    num_heads: int | None = None,
) -> SpatialReductionAttention:
    """Build spatial-reduction attention; class tokens are among the tokens and the keys.

    A map smaller than s is padded to it. The linear form has pool^2 keys at any map size. A host of
    one stage counts as the first; for its 14 x 14 tokens type ``reduction=2``.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets the reduction.
        reduction: s, side of the windows that become one key; by default 8, 4, 2 or 1 by stage.
        linear: Use the linear form, in the place of the reduction.
        pool: Side of the linear form's map.
        num_heads: h, a divisor of C; by default as many as leave each 64 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C; with s > 1 also
    s^2 C^2 + 3 C, and C^2 + 3 C in the linear form.

    Raises:
        ValueError: A reduction or pool below 1, or heads that do not divide C.

    Source: PVT (ICCV 2021), https://arxiv.org/abs/2102.12122; PVT v2.
    """
    side = REDUCTIONS[min(slot.stage if slot else 0, 3)] if reduction is None else reduction
    check_range("reduction", side, 1)
    check_range("pool", pool, 1)
    heads = usual_heads(dim, num_heads, HEAD_DIM)
    return SpatialReductionAttention(dim, heads, side, pool if linear else None)
