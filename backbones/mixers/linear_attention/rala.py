"""Rank-augmented linear attention: keys are reweighted by a global query, outputs by the input.

    y = W (o * (R(q) (R(k')^T v / N) / (q mean k') + L v)),  k'_n = N a_n k_n
    a = softmax(mean q . k_n / sqrt d),  q = ELU(W_q x) + 1,  k = ELU(W_k x) + 1,  o = W_o x

a raises the rank of the buffer k'^T v, o that of the output. R turns queries and keys by the place
of their token (rotary positions per head), L is a depthwise 5x5 convolution.

Source: Fan et al., "Breaking the Low-Rank Dilemma of Linear Attention", CVPR 2025,
https://arxiv.org/abs/2411.07635. The paper leaves R and L open; they, 1e-6 in the divisor, 64
channels per head, truncated normal weights of 0.02 and the last frequency of 1 / 10000 are those of
the authors' code (https://github.com/qhfan/RALA), which gave the published numbers. With
``inclusive=false`` the frequencies end one step before, as in flash-bidirectional-linear-attention.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_multiple
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_all
from backbones.layers.linear_attention import attend
from backbones.layers.rotary import rotate_by_axes
from backbones.mixer import Mixer
from backbones.registry import register_mixer

HEAD_DIM = 64


@register_mixer("rala", kind="token", source="RALA (CVPR 2025), frequencies of the released code")
class RankAugmentedLinearAttention(Mixer):
    """W (o * (R(q) (R(k')^T v / N) / (q mean k') + L v)) with reweighted keys k'.

    Rotary positions are computed for each map size. Class tokens are not mixed: the host pools its
    map.

    Args:
        dim: Channels C, a multiple of 4.
        num_heads: h, a divisor of C / 4; by default as many as leave each 64 channels or more.
        qkv_bias: Add a bias in the projections of q, k, v and o.
        inclusive: The last frequency is 1 / 10000, as in the authors' code.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2 + 31 C.

    Raises:
        ValueError: C is not a multiple of 4, or ``num_heads`` does not divide C / 4.

    Source: RALA (CVPR 2025), https://arxiv.org/abs/2411.07635.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        qkv_bias: bool = True,
        inclusive: bool = True,
    ) -> None:
        super().__init__()
        check_multiple("dim with rotary positions", dim, 4)
        self.num_heads = usual_heads(dim // 4, num_heads, HEAD_DIM // 4)
        self.inclusive = inclusive
        self.qkvo = nn.Linear(dim, 4 * dim, bias=qkv_bias)
        self.lepe = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.proj = nn.Linear(dim, dim)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Attend with reweighted keys, then weigh by o: (B, H, W, C) -> (B, H, W, C)."""
        dim = x.shape[-1]
        qk, v, o = self.qkvo(x).split((2 * dim, dim, dim), dim=-1)
        local = to_nhwc(self.lepe(to_nchw(v)))
        q, k = (F.elu(qk) + 1).chunk(2, dim=-1)
        mixed = self._attend(q, k, v)
        return self.proj(o * (mixed + local))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention without L, of three maps: (B, H, W, C) -> (B, H, W, C)."""
        size = q.shape[1:3]
        q, k, v = (split_heads(part.flatten(1, 2), self.num_heads) for part in (q, k, v))
        global_query = q.mean(dim=-2, keepdim=True) * q.shape[-1] ** -0.5
        share = (global_query @ k.mT).softmax(dim=-1).mT  # (B, h, N, 1)
        k = k * (share * k.shape[-2])
        query_key = torch.cat([q, k], dim=1).transpose(1, 2).unflatten(1, size)  # (B, H, W, 2 h, d)
        turned = rotate_by_axes(query_key, self.inclusive).flatten(1, 2).transpose(1, 2)
        turned_q, turned_k = turned.chunk(2, dim=1)
        return merge_heads(attend(turned_q, turned_k, v, weighing=(q, k))).unflatten(1, size)
