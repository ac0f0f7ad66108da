"""Self-attention over the whole map, the token mixer that the others are compared with.

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, https://arxiv.org/abs/1706.03762,
Sec. 3.2; as an instance of MetaMixer: FFNet, Fig. 1 and 8.
"""

from __future__ import annotations

from backbones.layers.heads import usual_heads
from backbones.layers.init import init_all
from backbones.mixers.metamixer.instances import SelfAttention, self_attention
from backbones.registry import register_mixer


@register_mixer("attention", kind="token", source="Vaswani et al., NeurIPS 2017, Sec. 3.2.2")
def attention(dim: int, *, num_heads: int | None = None, qkv_bias: bool = True) -> SelfAttention:
    """Build multi-head self-attention over all tokens, without positions, at any map size.

    Class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: Heads, a divisor of C; by default as many as leave each 32 channels or more.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 4 C^2 + 4 C.

    Raises:
        ValueError: ``num_heads`` does not divide C.

    Source: Vaswani et al., NeurIPS 2017, Sec. 3.2, https://arxiv.org/abs/1706.03762.
    """
    mixer = self_attention(dim, usual_heads(dim, num_heads), qkv_bias)
    init_all(mixer)
    return mixer
