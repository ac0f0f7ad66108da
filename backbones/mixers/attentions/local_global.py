"""EdgeViT's three steps: aggregate neighbours, attend between sampled tokens, spread the results.

    y = L x + W LN(S A(x + L x)),  L = W2 D W1

D is a depthwise 5x5 convolution, A attention between every s-th token of every s-th row, S a
transposed depthwise convolution of side s. x + y is a block of EdgeViT without norms and FFNs.

Source: Pan et al., "EdgeViTs: Competing Light-weight CNNs on Mobile Devices with Vision
Transformers", ECCV 2022, https://arxiv.org/abs/2205.03436. The host EdgeViT uses both parts.

Axes: B images, C channels, H W map.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import crop
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 36
SAMPLINGS = (4, 2, 2, 1)  # by stage


class LocalConv(Mixer):
    """1x1, depthwise 5x5 and 1x1 convolution, all with bias: (B, H, W, C) -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.attn = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)

    def mix(self, x: Tensor) -> Tensor:
        """Apply the three convolutions: (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self.conv2(self.attn(self.conv1(to_nchw(x)))))


class SampledAttention(Mixer):
    """Self-attention between every s-th token of every s-th row, then a transposed convolution.

    The depthwise convolution of side s spreads each result over s x s tokens; LayerNorm follows.

    Args:
        dim: Channels C.
        sampling: s; with 1 the convolution is left out.
        num_heads: n, a divisor of C; by default as many as leave each 36 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: EdgeViTs (ECCV 2022), "global sparse attention", "local propagation".
    """

    def __init__(self, dim: int, sampling: int, num_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.sampling = usual_heads(dim, num_heads, HEAD_DIM), sampling
        self.qkv = nn.Linear(dim, 3 * dim)
        self.spread, self.norm = None, None
        if sampling > 1:
            self.spread = nn.ConvTranspose2d(dim, dim, sampling, sampling, groups=dim)
            self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Attend between sampled tokens and spread the results: (B, H, W, C) -> the same."""
        height, width = x.shape[1:3]
        x = x[:, :: self.sampling, :: self.sampling]
        size = x.shape[1:3]
        q, k, v = (
            split_heads(part, self.num_heads) for part in self.qkv(x.flatten(1, 2)).chunk(3, -1)
        )
        x = merge_heads(F.scaled_dot_product_attention(q, k, v)).unflatten(1, size)
        if self.spread is not None and self.norm is not None:
            x = self.norm(crop(to_nhwc(self.spread(to_nchw(x))), height, width, rows=1))
        return self.proj(x)


@register_mixer("local_global", kind="token", source="EdgeViTs (ECCV 2022)")
class LocalGlobalLocal(Mixer):
    """L x + A(x + L x), or A(x) without sampling, as in EdgeViT's last stage.

    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        sampling: s, distance of the tokens that attend; by default 4, 2, 2 or 1 by stage.
        num_heads: n, a divisor of C; by default as many as leave each 36 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with s > 1: 6 C^2 + (s^2 + 35) C.

    Raises:
        ValueError: A sampling below 1.

    Source: EdgeViTs (ECCV 2022), https://arxiv.org/abs/2205.03436.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        sampling: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__()
        side = SAMPLINGS[min(slot.stage if slot else 0, 3)] if sampling is None else sampling
        check_range("sampling", side, 1)
        self.local = LocalConv(dim) if side > 1 else None
        self.attn = SampledAttention(dim, side, num_heads)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Return L x + A(x + L x): (B, H, W, C) -> (B, H, W, C)."""
        if self.local is None:
            return self.attn.mix(x)
        near = self.local.mix(x)
        return near + self.attn.mix(x + near)
