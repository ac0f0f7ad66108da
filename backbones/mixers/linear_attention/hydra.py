"""Hydra attention: linear attention with as many heads as channels.

    y = W (q^ * sum_n k^_n * v_n)

q^ and k^ are queries and keys of length 1 over the channels of each token.

Source: Bolya et al., "Hydra Attention: Efficient Attention with Many Heads", ECCV 2022 workshops,
https://arxiv.org/abs/2209.07484. Projections and their truncated normal weights of 0.02 are those
of the paper's host, DeiT.

Axes: B images, N tokens, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.init import init_linear
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer


@register_mixer("hydra", kind="token", source="Hydra Attention (2022)")
class HydraAttention(SequenceMixer):
    """W (q^ * sum_n k^_n * v_n); class tokens are among the tokens.

    Args:
        dim: Channels C.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C.

    Source: Hydra Attention (2022), https://arxiv.org/abs/2209.07484.
    """

    ignores_order = True

    def __init__(self, dim: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Return W (q^ * sum_n k^_n * v_n): (B, N, C) -> (B, N, C)."""
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        summary = (F.normalize(k, dim=-1) * v).sum(dim=1, keepdim=True)
        return self.proj(F.normalize(q, dim=-1) * summary)
