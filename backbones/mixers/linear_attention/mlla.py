"""Mamba-like linear attention: linear attention between the projections and the gate of Mamba.

    y = W_o (A(u) * SiLU(W_g x)),  u = SiLU(D W_i x)
    A(u) = R(q) (R(k)^T u / N) / (q mean k) + L u,  q = ELU(W_q u) + 1,  k = ELU(W_k u) + 1

R turns queries and keys by the place of their token (rotary positions over all channels). D and L
are depthwise 3x3 convolutions. The values are u.

Source: Han et al., "Demystify Mamba in Vision: A Linear Attention Perspective", NeurIPS 2024,
https://arxiv.org/abs/2405.16605, Fig. 3. 32 channels per head, 1e-6 in the divisor and truncated
normal weights of 0.02 are those of the authors' code. Its two convolutions before the norms belong
to the block and stay out of the mixer.

Axes: B images, H W map, N tokens, C channels, h heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_multiple
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.layers.linear_attention import attend
from backbones.layers.rotary import rotate_by_axes
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("mlla", kind="token", source="MLLA (NeurIPS 2024)")
class MambaLikeLinearAttention(Mixer):
    """W_o (A(u) * SiLU(W_g x)) with linear attention A; class tokens are not mixed.

    Rotary positions are computed for each map size. The host pools its map.

    Args:
        dim: Channels C, a multiple of 4.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        qkv_bias: Add a bias in the projections of queries and keys.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2 + 25 C.

    Raises:
        ValueError: C is not a multiple of 4, or ``num_heads`` does not divide C.

    Source: MLLA (NeurIPS 2024), https://arxiv.org/abs/2405.16605.
    """

    def __init__(self, dim: int, *, num_heads: int | None = None, qkv_bias: bool = True) -> None:
        super().__init__()
        check_multiple("dim with rotary positions", dim, 4)
        self.num_heads = usual_heads(dim, num_heads)
        self.in_proj, self.act_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dwc, self.lepe = (nn.Conv2d(dim, dim, 3, padding=1, groups=dim) for _ in range(2))
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Return W_o (A(u) * SiLU(W_g x)): (B, H, W, C) -> (B, H, W, C)."""
        values = F.silu(self.dwc(to_nchw(self.in_proj(x))))
        mixed = self._attend(to_nhwc(values)) + to_nhwc(self.lepe(values))
        return self.out_proj(mixed * F.silu(self.act_proj(x)))

    def _attend(self, u: Tensor) -> Tensor:
        """Return the attention without L: (B, H, W, C) -> (B, H, W, C)."""
        query_key = F.elu(self.qk(u).unflatten(-1, (2, -1))) + 1  # (B, H, W, 2, C)
        parts = (*query_key.unbind(3), *rotate_by_axes(query_key).unbind(3), u)
        q, k, turned_q, turned_k, v = (
            split_heads(part.flatten(1, 2), self.num_heads) for part in parts
        )
        mixed = attend(turned_q, turned_k, v, weighing=(q, k))
        return merge_heads(mixed).unflatten(1, u.shape[1:3])
