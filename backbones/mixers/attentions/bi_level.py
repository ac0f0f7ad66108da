"""Bi-level routing attention: tokens of a region attend to the k most related regions.

    y = W (softmax(s Q K_r^T) V_r + D V),  r = the k regions with the largest s q_i . k_j

The map is cut into R x R regions. q_i and k_j are means of queries and keys over a region, K_r and
V_r all keys and values of the chosen regions, D is a depthwise 5x5 convolution.

Source: Zhu et al., "BiFormer: Vision Transformer with Bi-Level Routing Attention", CVPR 2023,
https://arxiv.org/abs/2303.08810. R = 7, k = 1, 4, 16 and all by stage, 32 channels per head, s =
C^-1/2 for all heads and truncated normal weights of 0.02 are those of the authors' code, as is
routing without a gradient.

Axes: B images, H W map, C channels, h heads, R^2 regions of T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import ceil_div, crop, missing
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot

TOPK = (1, 4, 16)  # by stage; all in the fourth


@register_mixer("bi_level", kind="token", source="BiFormer (CVPR 2023)")
class BiLevelRoutingAttention(Mixer):
    """W (softmax(s Q K_r^T) V_r + D V) with keys and values of the k most related regions r.

    Maps are padded with zeros to whole regions, where padding attends. Class tokens are not mixed:
    the host pools its map. A host of one stage counts as the first; for its 14 x 14 tokens type
    ``topk=16``.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets k.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        regions: R, regions along an axis.
        topk: k, regions that a region attends to; by default 1, 4, 16 or all by stage.
        kernel_size: Side of D, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 30 C.

    Raises:
        ValueError: R below 1, k below 1 or above R^2, or ``num_heads`` that does not divide C.

    Source: BiFormer (CVPR 2023), https://arxiv.org/abs/2303.08810.
    """

    makes_choices = True
    shows_attention = False

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        num_heads: int | None = None,
        regions: int = 7,
        topk: int | None = None,
        kernel_size: int = 5,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        usual = [min(k, regions**2) for k in (*TOPK, regions**2)]
        count = usual[min(slot.stage if slot else 0, 3)] if topk is None else topk
        check_range("regions", regions, 1)
        check_range("topk", count, 1, regions**2)
        self.num_heads = usual_heads(dim, num_heads)
        self.regions, self.topk = regions, count
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.lepe = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend to the most related regions: (B, H, W, C) -> (B, H, W, C)."""
        (height, width), dim = x.shape[1:3], x.shape[-1]
        below, right = missing(height, self.regions), missing(width, self.regions)
        padded = F.pad(x, (0, 0, 0, right, 0, below))
        q, kv = self.qkv(padded).split((dim, 2 * dim), dim=-1)
        sides = (ceil_div(height, self.regions), ceil_div(width, self.regions))
        precise = torch.promote_types(x.dtype, torch.float32)
        regions = self._choose_regions(self._cut(padded, sides).detach().mean(2, dtype=precise))
        mixed = self._attend(self._cut(q, sides), self._cut(kv, sides), regions)
        mixed = mixed.unflatten(1, (self.regions, -1)).unflatten(3, sides)
        mixed = mixed.transpose(2, 3).flatten(1, 2).flatten(2, 3)
        local = to_nhwc(self.lepe(to_nchw(kv[..., dim:])))
        return self.proj(crop(mixed + local, height, width, rows=1))

    def _cut(self, x: Tensor, sides: tuple[int, int]) -> Tensor:
        """Cut a map into regions: (B, H, W, D) -> (B, R^2, T, D)."""
        x = x.unflatten(2, (self.regions, sides[1])).unflatten(1, (self.regions, sides[0]))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _choose_regions(self, means: Tensor) -> Tensor:
        """Return the most related regions of each region: (B, R^2, C) -> (B, R^2 k).

        The mean of queries is the query of the mean. Both are in float32 at least, since a choice
        turns rounding into another region.
        """
        precise, dim = means.dtype, means.shape[-1]
        weight, bias = self.qkv.weight.detach(), self.qkv.bias.detach()
        with without_autocast(means.device):
            query_key = F.linear(means, weight[: 2 * dim].to(precise), bias[: 2 * dim].to(precise))
            related = query_key[..., :dim] @ query_key[..., dim:].mT
        return related.topk(self.topk, dim=-1).indices.flatten(1)

    def _attend(self, q: Tensor, kv: Tensor, index: Tensor) -> Tensor:
        """Attend to the chosen regions: (B, R^2, T, C) and (B, R^2, T, 2 C) -> (B, R^2, T, C)."""
        dim, count = q.shape[-1], q.shape[1]
        rows = kv.flatten(2)
        key_value = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
        key_value = key_value.unflatten(-1, (-1, 2 * dim)).unflatten(
            1, (count, -1)
        )  # (B, R^2, k, T, D)
        # One batch axis of images and regions, as torch's fused attention asks.
        k, v = key_value.flatten(2, 3).flatten(0, 1).chunk(2, dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in (q.flatten(0, 1), k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)
        return merge_heads(mixed).unflatten(0, (-1, count))
