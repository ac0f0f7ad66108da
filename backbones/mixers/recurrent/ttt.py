"""Test-time training: a small network is fitted to keys and values, then read by queries.

    w' = w - rate * clip(grad of L(w)),  L = -scale mean_t v_t . f_w(k_t),  y = W [f_w'(q), g_w'(q)]

f is (w1 x) * SiLU(w2 x) per head, g a depthwise 3x3 convolution of d further channels. One step of
gradient descent from the learnt w, whose gradients are divided by their length plus 1, for each
image. The step is written out, so that training differentiates it.

Source: Han et al., "ViT^3: Unlocking Test-Time Training in Vision", 2025,
https://arxiv.org/abs/2512.01643. The inner networks, their rate of 1, scale of 1/3, 32 channels per
head and the initialisation are those of the authors' code. Its hierarchical networks turn queries
and keys of f by rotary positions, ``rope=true``; its plain ones do not.

Axes: B images, N = H W tokens, h heads of d channels, t = 9 places of the 3x3 convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nhwc
from backbones.layers.bounds import check_multiple
from backbones.layers.graph_sizes import is_any_size
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.registry import register_mixer

SCALE = 1 / 3
BASE = 10000.0


@register_mixer("ttt", kind="token", source="ViT^3 (2025)")
class TestTimeTraining(Mixer):
    """W [f_w'(q), g_w'(q)] with w' fitted to the map; class tokens are not mixed.

    The host pools its map. The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        rate: Inner learning rate.
        rope: Turn pairs of channels by a token's row and column; C must be a multiple of 4.
        qkv_bias: Biases of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 6 C d + 4 C + 12 d.

    Raises:
        ValueError: Heads that do not divide C, or ``rope`` with C not a multiple of 4.

    Source: ViT^3 (2025), https://arxiv.org/abs/2512.01643.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        rate: float = 1.0,
        rope: bool = False,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        heads = usual_heads(dim, num_heads)
        if rope:
            check_multiple("dim with rope=true", dim, 4)
        d = dim // heads
        self.num_heads, self.rate, self.rope = heads, rate, rope
        self.widths = (dim, dim, dim, 3 * d)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias)
        self.w1, self.w2 = (nn.Parameter(torch.empty(heads, d, d)) for _ in range(2))
        self.w3 = nn.Parameter(torch.empty(d, 9))
        self.proj = nn.Linear(dim + d, dim)
        self.apply(init_linear)
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)

    def mix(self, x: Tensor) -> Tensor:
        """Fit both networks to the map and read them: (B, H, W, C) -> (B, H, W, C)."""
        q, k, v, around = self.qkv(x).split(self.widths, dim=-1)
        if self.rope:
            q, k = rotate_by_places(q), rotate_by_places(k)
        q, k, v = (split_heads(part.flatten(1, 2), self.num_heads) for part in (q, k, v))
        a, b = (q @ self.fitted_gates(k, v)).chunk(2, dim=-1)
        of_heads = merge_heads(a * F.silu(b)).unflatten(1, x.shape[1:3])
        return self.proj(torch.cat([of_heads, self.convolved(around)], dim=-1))

    def fitted_gates(self, k: Tensor, v: Tensor) -> Tensor:
        """Return [w1, w2] after a step on L: (B, h, N, d) -> (B, h, d, 2 d)."""
        weights = torch.cat([self.w1, self.w2], dim=-1)
        z1, z2 = (k @ weights).chunk(2, dim=-1)
        gate, gated = z2.sigmoid(), F.silu(z2)
        slope = torch.addcmul(gated, gate, 1 - gated)
        errors = (-SCALE / k.shape[2] * v).unsqueeze(3) * torch.stack([gated, z1 * slope], dim=3)
        return self.descend(weights, k.mT @ errors.flatten(3), dim=-2)

    def convolved(self, x: Tensor) -> Tensor:
        """Fit the convolution to k and v and apply it to q: (B, H, W, 3 d) -> (B, H, W, d)."""
        batch, height, width, _ = x.shape
        # Each channel of each image is a map of its own, with a kernel of its own.
        q, k, v = x.permute(0, 3, 1, 2).unflatten(1, (3, -1)).transpose(0, 1).flatten(1, 2)
        error = -SCALE / (height * width) * v.flatten(1)
        near = F.unfold(k.unsqueeze(1), 3, padding=1)  # (B d, t, N)
        gradient = (near @ error.unsqueeze(-1)).view(batch, *self.w3.shape)
        kernel = self.descend(self.w3, gradient, dim=-1).flatten(0, 1)
        if is_any_size(x.shape[:1]):  # a number of groups would freeze a graph's batch
            y = kernel.unsqueeze(1) @ F.unfold(q.unsqueeze(1), 3, padding=1)
        else:
            groups = len(kernel)
            y = F.conv2d(q.unsqueeze(0), kernel.view(-1, 1, 3, 3), padding=1, groups=groups)
        return to_nhwc(y.view(batch, -1, height, width))

    def descend(self, weight: Tensor, gradient: Tensor, dim: int) -> Tensor:
        """Return weight - rate * gradient / (its length along an axis + 1)."""
        lengths = gradient.norm(dim=dim, keepdim=True)
        return torch.addcdiv(weight, gradient, lengths + 1, value=-self.rate)


def rotate_by_places(x: Tensor) -> Tensor:
    """Turn pairs of channels by the row (first half) and column: (B, H, W, C) -> the same.

    Pair p of a half turns by the place times 10000^(-p / (C / 4)).
    """
    height, width, dim = x.shape[1:]
    precise = torch.promote_types(x.dtype, torch.float32)
    pairs = x.to(precise).unflatten(-1, (-1, 2))
    index = torch.arange(dim // 4, device=x.device, dtype=precise)
    periods = torch.pow(BASE, index / (dim // 4))
    rows, columns = (
        torch.arange(side, device=x.device, dtype=precise)[:, None] / periods
        for side in (height, width)
    )
    angles = torch.cat(
        [rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)], dim=-1
    )
    (real, imaginary), cosine, sine = pairs.unbind(-1), angles.cos(), angles.sin()
    turned = [real * cosine - imaginary * sine, real * sine + imaginary * cosine]
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
