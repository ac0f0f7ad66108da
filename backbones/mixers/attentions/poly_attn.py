"""Polynomial attention: a fourth power in the place of the exponential of softmax.

    y = W D_o A(D_q u, D_k u, D_v v),  (u, v) = W_in x
    A(q, k, v) = P v / sum P,  P = (s q k^T + 1)^4

Queries and keys share the projection u. D_q and D_k are depthwise 5x5 convolutions, D_v and D_o 3x3
ones. s is a sigmoid of a learnt number per head, 1 / sqrt d at the start.

Source: Wang, Gregory and Chrysos, "Activation-Free Backbones for Image Recognition: Polynomial
Alternatives within MetaFormer-Style Vision Models" (PolyNeXt), ICML 2026,
https://arxiv.org/abs/2605.20839, PolyAttn. Heads of 32 channels, one per 64 channels of the map,
layers without bias and torch's initialisation are those of the authors' code. There a layer norm
precedes the mixer, as in most hosts here.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixer import Mixer
from backbones.registry import register_mixer

POWER = 4


@register_mixer("poly_attn", kind="token", source="PolyNeXt (ICML 2026), PolyAttn")
class PolynomialAttention(Mixer):
    """W D_o (P v / sum P) with P = (s q k^T + 1)^4; class tokens are not mixed: the host pools.

    Args:
        dim: Channels C.
        head_dim: d, channels of a head, at least 2.
        num_heads: h; by default one per 64 channels of the map, rounded up.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 h d C + 68 h d + h.

    Raises:
        ValueError: ``head_dim`` below 2, or ``num_heads`` below 1.

    Source: PolyNeXt (ICML 2026), https://arxiv.org/abs/2605.20839.
    """

    def __init__(self, dim: int, *, head_dim: int = 32, num_heads: int | None = None) -> None:
        super().__init__()
        heads = math.ceil(dim / 64) if num_heads is None else num_heads
        check_range("head_dim", head_dim, 2)
        check_range("num_heads", heads, 1)
        width, start = heads * head_dim, head_dim**-0.5
        self.qkv = PointwiseConv2d(dim, 2 * width, bias=False)
        self.q_conv, self.k_conv, self.v_conv, self.final_conv = (
            nn.Conv2d(width, width, side, padding=side // 2, groups=width, bias=False)
            for side in (5, 5, 3, 3)
        )
        self.scale = nn.Parameter(torch.full((heads, 1, 1), math.log(start / (1 - start))))
        self.proj = PointwiseConv2d(width, dim, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        """Attend by the fourth power: (B, H, W, C) -> (B, H, W, C)."""
        shared, value = self.qkv(to_nchw(x)).chunk(2, dim=1)
        convolved = (self.q_conv(shared), self.k_conv(shared), self.v_conv(value))
        q, k, v = (part.flatten(2).unflatten(1, (len(self.scale), -1)).mT for part in convolved)
        logits = (q @ k.mT) * self.scale.sigmoid() + 1
        powers = logits.to(torch.promote_types(logits.dtype, torch.float32)) ** POWER
        weights = powers / powers.sum(dim=-1, keepdim=True).clamp(min=1e-12)
        mixed = (weights.to(v.dtype) @ v).mT.flatten(1, 2).unflatten(2, x.shape[1:3])
        return to_nhwc(self.proj(self.final_conv(mixed)))
