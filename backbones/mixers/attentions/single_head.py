"""Single-head self-attention of a part of the channels; the others pass unchanged.

    y = BN(W ReLU([softmax(q k^T / sqrt d) v, x_2])),  (q, k, v) = BN(W_qkv GN(x_1))

x_1 are the first r C channels, GN is a group norm of one group.

Source: Yun and Ro, "SHViT: Single-Head Vision Transformer with Memory Efficient Macro Design", CVPR
2024, https://arxiv.org/abs/2401.16456. r = 1/4.67 and d = 16 are the paper's, norms and the last
scale of 0 at the start those of the authors' code. Norms of the host stay.

Axes: B images, H W map, C channels, d channels of queries and keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.reparam import ConvBN
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("single_head", kind="token", source="SHViT (CVPR 2024)")
class SingleHeadAttention(Mixer):
    """BN(W ReLU([softmax(q k^T / sqrt d) v, x_2])) with q, k, v of the channels x_1.

    Class tokens are not mixed: the host pools its map. ``layers.reparam.fuse`` folds the batch
    norms into the layers before them.

    Args:
        dim: Channels C.
        ratio: r, share of the channels that attend, rounded to whole channels.
        qk_dim: d, channels of queries and keys.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with D = r C: C^2 + D^2 + 2 d D +
    2 C + 4 D + 4 d.

    Raises:
        ValueError: A ratio that gives less than one channel or more than C, or d below 1.

    Source: SHViT (CVPR 2024), https://arxiv.org/abs/2401.16456.
    """

    ignores_order = True

    def __init__(self, dim: int, *, ratio: float = 0.214, qk_dim: int = 16) -> None:
        super().__init__()
        part = round(ratio * dim)
        check_range("ratio * dim", part, 1, dim)
        check_range("qk_dim", qk_dim, 1)
        self.parts, self.widths = (part, dim - part), (qk_dim, qk_dim, part)
        self.pre_norm = nn.GroupNorm(1, part)
        self.qkv, self.proj = ConvBN(part, sum(self.widths)), ConvBN(dim, dim)
        nn.init.zeros_(self.proj.norm.weight)

    def mix(self, x: Tensor) -> Tensor:
        """Attend with the first channels: (B, H, W, C) -> (B, H, W, C)."""
        attending, passing = to_nchw(x).split(self.parts, dim=1)
        q, k, v = (
            self.qkv(self.pre_norm(attending.contiguous())).flatten(2).mT.split(self.widths, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        mixed = mixed.mT.unflatten(2, x.shape[1:3])
        return to_nhwc(self.proj(F.relu(torch.cat([mixed, passing], dim=1))))
