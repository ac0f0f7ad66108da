"""Gated attention: softmax attention, then a sigmoid gate from the input, per channel or head.

    y = W (softmax(q k^T / sqrt d) v * sigmoid(W_g x))

Source: Qiu et al., "Gated Attention for Large Language Models: Non-linearity, Sparsity, and
Attention-Sink-Free", NeurIPS 2025, https://arxiv.org/abs/2505.06708, position G1, with a gate per
head and channel or per head. The paper is about text; here each token attends to all tokens,
without positions. Layers without bias and the standard deviation of 0.02 are those of the authors'
released models (Qwen3-Next).

Axes: B images, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer

Gate = Literal["element", "head"]


@register_mixer("gated_attention", kind="token", source="Gated attention (NeurIPS 2025)")
class GatedAttention(SequenceMixer):
    """W (softmax(q k^T / sqrt d) v * sigmoid(W_g x)); class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        gate: One gate per "element" (channel of a head), or per "head".
        bias: Add a bias in all projections.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2, or 4 C^2 + h C with a gate
    per head.

    Raises:
        ValueError: ``num_heads`` does not divide C.

    Source: Gated attention (NeurIPS 2025), https://arxiv.org/abs/2505.06708.
    """

    ignores_order = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        gate: Gate = "element",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = usual_heads(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.gate = nn.Linear(dim, dim if gate == "element" else self.num_heads, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Attend, then gate each head: (B, N, C) -> (B, N, C)."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(tokens).chunk(3, dim=-1))
        gates = split_heads(self.gate(tokens).sigmoid(), self.num_heads)  # (B, h, N, d or 1)
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v) * gates))
