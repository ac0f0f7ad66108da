"""Channel group attention: softmax attention between the channels of a group, linear in tokens.

    y = W [A_1, ..., A_g],  A_i = Q_i softmax(K_i^T V_i / sqrt d)^T

Each channel is a token that holds an abstract of the whole map.

Source: Ding et al., "DaViT: Dual Attention Vision Transformers", ECCV 2022,
https://arxiv.org/abs/2204.03645. The roles of Q, K and V are those of the authors' code; they are
three equal projections, which the paper names in another order. Groups of 32 channels, biases and
truncated normal weights of 0.02 are the authors'.

Axes: B images, N tokens, C channels, g groups of d channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer


@register_mixer("channel_attention", kind="token", source="DaViT (ECCV 2022)")
class ChannelAttention(SequenceMixer):
    """W [A_1, ..., A_g] with A_i = Q_i softmax(K_i^T V_i / sqrt d)^T.

    Class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: g, groups, a divisor of C; by default as many as leave each 32 channels or more.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C.

    Raises:
        ValueError: ``num_heads`` does not divide C.

    Source: DaViT (ECCV 2022), https://arxiv.org/abs/2204.03645.
    """

    ignores_order = True
    shows_attention = False

    def __init__(self, dim: int, *, num_heads: int | None = None, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = usual_heads(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Attend between the channels of each group: (B, N, C) -> (B, N, C)."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(tokens).chunk(3, dim=-1))
        # Scaled before the product: sums over a large map do not fit into half precision.
        attention = ((k * k.shape[-1] ** -0.5).mT @ v).softmax(dim=-1)  # (B, g, d, d)
        return self.proj(merge_heads(q @ attention.mT))
