"""Multi-query attention on maps: all heads share keys and values, which may come from fewer tokens.

    y = W [A_1, ..., A_h],  A_i = softmax(q_i k^T / sqrt d) v
    k = W_k BN(D_k x),  v = W_v BN(D_v x)

D_k and D_v are depthwise convolutions with stride t; with t = 1 they and their norms are left out.

Source: Qin et al., "MobileNetV4: Universal Models for the Mobile Ecosystem", ECCV 2024,
https://arxiv.org/abs/2404.10518. Layers without bias, 4 heads of 64 channels and t = 2 before the
last stage are those of the paper's MNv4-Hybrid-M; the paper leaves initialisation open, and timm's
Xavier uniform is used.

Axes: B images, H W map, N tokens, M reduced tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.heads import merge_heads
from backbones.layers.pointwise import PointwiseConv2d
from backbones.layers.reparam import ConvBN
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot

STRIDES = (2, 2, 2, 1)  # by stage


@register_mixer("mqa2d", kind="token", source="MobileNetV4 (ECCV 2024)")
class MultiQueryAttention(Mixer):
    """W [A_1, ..., A_h] with the same keys and values in all heads.

    Class tokens are not mixed: the host pools its map. A host of one stage counts as the first.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets the stride.
        num_heads: h.
        key_dim: d, channels of a head.
        stride: t, of keys and values; by default 2, and 1 in the fourth stage.
        kernel_size: k, side of the depthwise convolutions, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 (h + 1) d C; with t > 1 also
    2 (k^2 + 2) C.

    Raises:
        ValueError: An even kernel, or another number below 1.

    Source: MobileNetV4 (ECCV 2024), https://arxiv.org/abs/2404.10518.
    """

    shows_attention = False

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        num_heads: int = 4,
        key_dim: int = 64,
        stride: int | None = None,
        kernel_size: int = 3,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        step = STRIDES[min(slot.stage if slot else 0, 3)] if stride is None else stride
        check_range("num_heads", num_heads, 1)
        check_range("key_dim", key_dim, 1)
        check_range("stride", step, 1)
        self.num_heads = num_heads
        self.query = PointwiseConv2d(dim, num_heads * key_dim, bias=False)
        self.key, self.value = (nn.Sequential() for _ in range(2))
        for part in (self.key, self.value):
            if step > 1:
                part.append(ConvBN(dim, dim, kernel_size, stride=step, groups=dim))
            part.append(PointwiseConv2d(dim, key_dim, bias=False))
        self.proj = PointwiseConv2d(num_heads * key_dim, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)

    def mix(self, x: Tensor) -> Tensor:
        """Attend with shared keys and values: (B, H, W, C) -> (B, H, W, C)."""
        maps, size = to_nchw(x), x.shape[1:3]
        # The heads of all tokens are queries of one head, (B, 1, h N, d).
        queries = self.query(maps).flatten(2).unflatten(1, (self.num_heads, -1)).mT
        k, v = (part(maps).flatten(2).mT[:, None] for part in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(queries.flatten(1, 2)[:, None], k, v)[:, 0]
        mixed = merge_heads(mixed.unflatten(1, (self.num_heads, -1)))
        return to_nhwc(self.proj(mixed.mT.unflatten(2, size)))
