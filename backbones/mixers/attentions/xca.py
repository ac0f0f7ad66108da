"""Cross-covariance attention: softmax attention between channels, linear in the number of tokens.

    y = W V softmax(K^T Q / tau)

Q and K are divided by the length of each channel over all tokens, so that K^T Q holds cosines. tau
is learnt per head; the parameter is 1 / tau.

Source: El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", NeurIPS 2021,
https://arxiv.org/abs/2106.09681. The paper leaves the initialisation open; tau = 1 and truncated
normal weights of 0.02 are those of the authors' code.

Axes: B images, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer

HEAD_DIM = 48


@register_mixer("xca", kind="token", source="XCiT (NeurIPS 2021)")
class CrossCovarianceAttention(SequenceMixer):
    """W V softmax(K^T Q / tau); class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 48 channels or more.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C + h.

    Raises:
        ValueError: ``num_heads`` does not divide C.

    Source: XCiT (NeurIPS 2021), https://arxiv.org/abs/2106.09681.
    """

    ignores_order = True
    shows_attention = False

    def __init__(self, dim: int, *, num_heads: int | None = None, qkv_bias: bool = True) -> None:
        super().__init__()
        heads = usual_heads(dim, num_heads, HEAD_DIM)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Return W V softmax(K^T Q / tau): (B, N, C) -> (B, N, C)."""
        heads = len(self.temperature)
        parts = self.qkv(tokens).mT.unflatten(1, (3, heads, -1)).unbind(1)  # (B, h, d, N) each
        q, k = (F.normalize(part, dim=-1) for part in parts[:2])
        attention = ((q @ k.mT) * self.temperature).softmax(dim=-1)
        return self.proj((attention @ parts[2]).flatten(1, 2).mT)
