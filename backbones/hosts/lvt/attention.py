"""Class attention of LVT; its attentions over the map are the mixers ``csa`` and ``rasa``.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809.

Axes: B images, C channels, N tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.heads import split_heads
from backbones.mixers.attentions.csa import HEAD_DIM


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
