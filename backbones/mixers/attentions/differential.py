"""Differential attention: the difference of two softmax attentions, which cancels common noise.

    y = W [(1 - l_0) RMSNorm(A_1 v - l A_2 v) per head],  A_i = softmax(q_i k_i^T / sqrt d)
    l = exp(a_1 . b_1) - exp(a_2 . b_2) + l_0,  l_0 = 0.8 - 0.6 exp(-0.3 n)

Each head has two pairs of queries and keys of d channels, and values of 2 d channels. n is the
index of the block.

Source: Ye et al., "Differential Transformer", ICLR 2025, https://arxiv.org/abs/2410.05258, Eq. 1 to
3. The paper is about text and counts n over the network; here n counts within a stage, and each
token attends to all tokens. Layers without bias, torch's initialisation and N(0, 0.1) for a_i and
b_i are those of the authors' code; it puts the scale of RMSNorm on all heads alike. Measured in
swin_t: the loss of one batch falls in five steps of AdamW at a rate of 3e-5, and rises first at
1e-4 and more.

Axes: B images, N tokens, C channels, h heads of 2 d channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_multiple, check_range
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 64
STD = 0.1  # of the vectors in lambda


@register_mixer("differential", kind="token", source="Differential Transformer (ICLR 2025)")
class DifferentialAttention(SequenceMixer):
    """W [(1 - l_0) RMSNorm(A_1 v - l A_2 v) per head]; class tokens are among the tokens.

    Args:
        dim: Channels C, even.
        slot: Place in the host; its block sets the depth.
        num_heads: h, a divisor of C / 2; by default as many as leave each 64 channels or more.
        depth: n, from 0; by default the block's index within its stage.
        bias: Add a bias in all projections.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 6 d.

    Raises:
        ValueError: Odd C, ``num_heads`` does not divide C / 2, or a negative depth.

    Source: Differential Transformer (ICLR 2025), Eq. 1 to 3, https://arxiv.org/abs/2410.05258.
    """

    ignores_order = True
    shows_attention = False

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        num_heads: int | None = None,
        depth: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        depth = (slot.block if slot else 0) if depth is None else depth
        check_multiple("dim", dim, 2)
        check_range("depth", depth, 0)
        self.num_heads = usual_heads(dim // 2, num_heads, HEAD_DIM // 2)
        half = dim // 2 // self.num_heads
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(STD * torch.randn(half)) for _ in range(4)
        )
        self.sub_norm = nn.RMSNorm(2 * half, eps=1e-5)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Attend by the difference of two attentions: (B, N, C) -> (B, N, C)."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(tokens).chunk(3, dim=-1))
        first, second = (
            F.scaled_dot_product_attention(one_q, one_k, v)
            for one_q, one_k in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        mixed = first - self._lambda().to(second.dtype) * second
        mixed = self.sub_norm(mixed.to(self.sub_norm.weight.dtype))  # autocast leaves it to us
        return self.proj(merge_heads(mixed * (1 - self.lambda_init)))

    def _lambda(self) -> Tensor:
        """Return l, in float32 at least."""
        precise = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = (self.lambda_q1.to(precise) * self.lambda_k1.to(precise)).sum().exp()
        second = (self.lambda_q2.to(precise) * self.lambda_k2.to(precise)).sum().exp()
        return first - second + self.lambda_init
