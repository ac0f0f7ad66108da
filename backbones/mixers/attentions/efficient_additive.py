"""Efficient additive attention: one global query, linear in the number of tokens.

    g = sum_n a_n q_n,  a = Q w / |Q w|,  y = W2 (W1 (g * K) + Q)

Queries q_n and keys are vectors of length 1 per token. The weights a are of length 1 over the
tokens. The global query g, times each key, takes the place of values.

Source: Shaker et al., "SwiftFormer: Efficient Additive Attention for Transformer-based Real-time
Mobile Vision Applications", ICCV 2023, https://arxiv.org/abs/2303.15446. The length 1 of a, where
the paper scales by sqrt C alone, W2 and the initialisation are those of the authors' code.

Axes: B images, N tokens, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.init import init_linear
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer


@register_mixer("efficient_additive", kind="token", source="SwiftFormer (ICCV 2023)")
class EfficientAdditiveAttention(SequenceMixer):
    """W2 (W1 (g * K) + Q) with the global query g; class tokens are among the tokens.

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 5 C.

    Source: SwiftFormer (ICCV 2023), https://arxiv.org/abs/2303.15446.
    """

    ignores_order = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_query, self.to_key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.w_g = nn.Parameter(torch.randn(dim, 1))
        self.proj, self.final = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Return W2 (W1 (g * K) + Q): (B, N, C) -> (B, N, C)."""
        query = F.normalize(self.to_query(tokens), dim=-1)
        key = F.normalize(self.to_key(tokens), dim=-1)
        scores = query @ self.w_g * tokens.shape[-1] ** -0.5
        weights = F.normalize(scores, dim=1)
        summary = (weights * query).sum(dim=1, keepdim=True)
        return self.final(self.proj(summary * key) + query)
