"""Attention without softmax, whose cost grows with the number of tokens and not with its square.

Source: Katharopoulos et al., "Transformers are RNNs", ICML 2020,
https://arxiv.org/abs/2006.16236, Eq. 5 to 7.

Axes: B images, P prefix tokens, N = P + H * W tokens, h heads, d channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.registry import register_mixer


@register_mixer(
    "linear_attention",
    kind="token",
    source="Katharopoulos et al., ICML 2020, Eq. 5 to 7",
    named_on=("swin_t", "deit_t"),
    ignores_order=True,
)
class LinearAttention(Mixer):
    """phi(Q) (phi(K)^T V) over its sum of weights, with phi(x) = ELU(x) + 1.

    Class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: Heads, a divisor of C.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    prefix_mixing = "joint"

    def __init__(self, dim: int, *, num_heads: int = 1) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        return self.mix_joint(x, x.new_empty(x.shape[0], 0, x.shape[-1]))[0]

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        heads = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, h, N, d)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k = k / k.sum(-2, keepdim=True)  # half precision holds the sums over many tokens
        mixed = q @ (k.mT @ v) / q.sum(-1, keepdim=True)
        tokens = self.proj(mixed.transpose(1, 2).flatten(2))
        count = prefix.shape[1]
        return tokens[:, count:].unflatten(1, x.shape[1:3]), tokens[:, :count]
