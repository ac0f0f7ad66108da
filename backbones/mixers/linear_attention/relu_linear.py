"""Multi-scale ReLU linear attention: attention by ReLU(q) ReLU(k), also of queries of larger scale.

    y = BN(W [A(q_0, k_0, v_0), ..., A(q_S, k_S, v_S)]),  (q_s, k_s, v_s) = G_s D_s (q_0, k_0, v_0)
    A(q, k, v) = ReLU(q) (ReLU(k)^T v) / (ReLU(q) sum ReLU(k))

D_s is a depthwise convolution, G_s a 1x1 convolution within each head's q, k or v.

Source: Cai et al., "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense
Prediction", ICCV 2023, https://arxiv.org/abs/2205.14756. One scale of 5x5 beside the first, 32
channels per head, 1e-15 in the divisor and truncated normal weights of 0.02 are those of the
authors' code.

Axes: B images, H W map, P prefix tokens, N tokens, C channels, h heads of d channels, S scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.heads import merge_heads, usual_heads
from backbones.layers.init import init_all
from backbones.layers.linear_attention import divide, sum_products
from backbones.layers.norms import normalise
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer

EPS = 1e-15


@register_mixer("relu_linear", kind="token", source="EfficientViT (ICCV 2023)")
class ReLULinearAttention(Mixer):
    """BN(W [A(q_0, k_0, v_0), ..., A(q_S, k_S, v_S)]) with attention A by ReLU features.

    Class tokens are among the tokens. Scales aggregate the map alone: class tokens have the same q,
    k and v at all scales.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        scales: Sides of the depthwise convolutions D_1, ..., D_S, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: (4 + S) C^2 + 3 S d C + 2 C and 3
    s^2 C for each side s.

    Raises:
        ValueError: ``num_heads`` does not divide C, or an even side.

    Source: EfficientViT (ICCV 2023), https://arxiv.org/abs/2205.14756.
    """

    prefix_mixing = "joint"

    def __init__(
        self, dim: int, *, num_heads: int | None = None, scales: Sequence[int] = (5,)
    ) -> None:
        super().__init__()
        check_odd(scales)
        self.num_heads = usual_heads(dim, num_heads)
        width = 3 * dim
        self.qkv = nn.Linear(dim, width, bias=False)
        self.aggreg = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, side, padding=side // 2, groups=width, bias=False),
                nn.Conv2d(width, width, 1, groups=3 * self.num_heads, bias=False),
            )
            for side in scales
        )
        self.proj = nn.Linear((1 + len(scales)) * dim, dim, bias=False)
        self.norm = nn.BatchNorm1d(dim)
        init_all(self)

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Attend at all scales: (B, H, W, C) and (B, P, C) -> both."""
        qkv, of_prefix = self.qkv(x), self.qkv(prefix)
        scales = [qkv, *(to_nhwc(part(to_nchw(qkv))) for part in self.aggreg)]
        rows = [torch.cat([of_prefix, scale.flatten(1, 2)], dim=1) for scale in scales]
        heads = len(scales) * self.num_heads
        # Each head has its q, k and v side by side: (B, heads, N, 3 d).
        parts = torch.cat(rows, dim=-1).unflatten(-1, (heads, -1)).transpose(1, 2)
        mixed = merge_heads(self._attend(*parts.chunk(3, dim=-1)))
        mixed = normalise(self.proj(mixed), self.norm)
        count = prefix.shape[1]
        return mixed[:, count:].unflatten(1, x.shape[1:3]), mixed[:, :count]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return A(q, k, v): three of (B, heads, N, d) -> the same."""
        dtype = v.dtype
        if dtype is torch.float16:  # it lacks the products of small weights: 0 / 0, as gradients
            q, k, v = q.float(), k.float(), v.float()
        with without_autocast(v.device):
            q, k = F.relu(q), F.relu(k)
            # A last channel of ones averages the weights.
            sums = q @ sum_products(k, F.pad(v, (0, 1), value=1.0))
            return divide(sums, 1, EPS / k.shape[-2]).to(dtype)
