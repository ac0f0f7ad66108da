"""Aggregated attention: each token attends to its neighbours and to a pooled map in one softmax.

    y = W ((a_near + q^ T + b) V_near + a_pool V_pool)
    [a_near, a_pool] = softmax([s Q K_near^T + B_near, s Q K_pool^T + B_pool]),  Q = q^ + E
    (K_pool, V_pool) = W_kv LN(pool(GELU(W_p x))),  s = softplus(t) log(number of keys)

q^ and the keys are of length 1 per head. E is a query embedding, T and b learnt tokens that weigh
neighbours by the query alone, t a temperature per head. B_near is a table of 3x3 offsets. B_pool
comes from an MLP of two layers on offsets in log space. Without pooling (r = 1) only the second
part remains, with all tokens as keys.

Source: Shi, "TransNeXt: Robust Foveal Visual Perception for Vision Transformers", CVPR 2024,
https://arxiv.org/abs/2311.17132. Windows of 3x3, r = 8, 4, 2, 1 by stage, 24 channels per head,
hidden width 512 and the initialisation are those of the authors' code.

Axes: B images, H W map, N tokens, C channels, h heads of d channels, M pooled tokens, K neighbours.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_fan_out
from backbones.layers.overlapping_windows import gather
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 24
REDUCTIONS = (8, 4, 2, 1)  # by stage
HIDDEN = 512  # of the MLP for positions
RANGE = 8  # of its inputs before the logarithm
START = 1 / 0.24  # temperature at first
Size = tuple[int, int]


def key_centres(length: int, pooled: int) -> list[int]:
    """Return twice the mean place of the tokens that each pooled one stands for."""
    starts = [i * length // pooled for i in range(pooled)]
    return [s - (-(i + 1) * length // pooled) - 1 for i, s in enumerate(starts)]


class PositionBias(nn.Module):
    """Bias between tokens and pooled tokens, by an MLP on their offset in log space.

    Offsets count in lengths of the map that the mixer was built for, so that it extrapolates.

    Args:
        heads: h.
        grid: Map size (H, W) that offsets are divided by.
    """

    no_weight_decay = ("fc1", "fc2")

    def __init__(self, heads: int, grid: Size) -> None:
        super().__init__()
        self.grid = grid
        self.fc1, self.fc2 = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, heads)

    def forward(self, size: Size, pooled: Size) -> Tensor:
        """Return the bias (h, N, M) of all tokens and pooled tokens."""
        (rows, down), (columns, right) = (
            self._offsets(*axis) for axis in zip(size, pooled, self.grid, strict=True)
        )
        # Each pair of offsets once; tokens and keys then look them up.
        table = torch.stack(
            [rows[:, None].expand(-1, len(columns)), columns.expand(len(rows), -1)], dim=-1
        )
        bias = self.fc2(F.relu(self.fc1(table.to(self.fc1.weight.dtype)))).movedim(-1, 0)
        bias = bias[:, down[:, None, :, None], right[None, :, None, :]]
        return bias.flatten(3).flatten(1, 2)

    def _offsets(self, length: int, pooled: int, grid: int) -> tuple[Tensor, Tensor]:
        """Return offsets along an axis in log space, and which one a token and a key have."""
        device, centres = self.fc1.weight.device, key_centres(length, pooled)
        precise = torch.promote_types(self.fc1.weight.dtype, torch.float32)
        step = 2 if length % pooled == 0 else 1  # halves of a token
        first, last = -centres[-1], 2 * (length - 1) - centres[0]
        offsets = torch.arange(first, last + 1, step, device=device).to(precise) / 2
        scaled = offsets / max(grid - 1, 1) * RANGE
        logs = scaled.sign() * scaled.abs().log1p() / math.log(RANGE)
        places = 2 * torch.arange(length, device=device)
        return logs, (places[:, None] - torch.tensor(centres, device=device) - first) // step


class FocalQueries(nn.Module):
    """Queries of length 1, and the same with an embedding and scaled: (B, N, C) -> two."""

    no_weight_decay = ("embedding", "temperature")

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.embedding = nn.Parameter(torch.empty(heads, 1, dim // heads))
        nn.init.trunc_normal_(self.embedding, std=0.02)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), math.log(math.exp(START) - 1)))

    def forward(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return q^ and s Q, each (B, h, N, d), for the numbers of keys (N, 1) or (1, 1)."""
        queries = F.normalize(split_heads(self.proj(tokens), len(self.embedding)), dim=-1)
        scale = F.softplus(self.temperature) * counts.to(self.temperature.dtype).log()
        return queries, (queries + self.embedding) * scale


class FullAttention(Mixer):
    """Attention without pooling, of the last stage: W softmax(s Q K^T + B) V."""

    def __init__(self, dim: int, heads: int, grid: Size) -> None:
        super().__init__()
        self.queries, self.kv = FocalQueries(dim, heads), nn.Linear(dim, 2 * dim)
        self.position, self.proj = PositionBias(heads, grid), nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Attend to all tokens: (B, H, W, C) -> (B, H, W, C)."""
        tokens, size = x.flatten(1, 2), (x.shape[1], x.shape[2])
        count = torch.full((1, 1), size[0] * size[1], device=x.device)
        _, q = self.queries(tokens, count)
        k, v = (split_heads(part, q.shape[1]) for part in self.kv(tokens).chunk(2, dim=-1))
        bias = self.position(size, size).to(q.dtype)
        k, v = F.normalize(k, dim=-1).to(q.dtype), v.to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.proj(merge_heads(mixed)).unflatten(1, size)


class PooledAttention(Mixer):
    """Attention to neighbours and pooled tokens: W ((a_near + q^ T + b) V_near + a_pool V_pool)."""

    no_weight_decay = ("near_bias",)

    def __init__(self, dim: int, heads: int, grid: Size, window: int, reduction: int) -> None:
        super().__init__()
        self.window, self.reduction = window, reduction
        self.queries, self.kv = FocalQueries(dim, heads), nn.Linear(dim, 2 * dim)
        self.near_bias = nn.Parameter(torch.empty(heads, 1, window**2))
        self.learnt_tokens = nn.Parameter(torch.empty(heads, dim // heads, window**2))
        self.learnt_bias = nn.Parameter(torch.zeros(heads, 1, window**2))
        nn.init.trunc_normal_(self.near_bias, std=0.0004)
        nn.init.trunc_normal_(self.learnt_tokens, std=0.02)
        self.pool_proj, self.norm = PointwiseConv2d(dim, dim), nn.LayerNorm(dim)
        self.position, self.proj = PositionBias(heads, grid), nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Attend to neighbours and pooled tokens: (B, H, W, C) -> (B, H, W, C)."""
        size, tokens = (x.shape[1], x.shape[2]), x.flatten(1, 2)
        pooled = (max(1, size[0] // self.reduction), max(1, size[1] // self.reduction))
        exists = self._near(x.new_ones(1, *size, 1))[:, 0, :, 0].mT > 0  # (N, K)
        queries, q = self.queries(tokens, exists.sum(1, keepdim=True) + pooled[0] * pooled[1])

        heads, count = q.shape[1], tokens.shape[1]
        k, v = self.kv(torch.cat([tokens, self._pool(x, pooled)], dim=1)).chunk(2, dim=-1)
        k = F.normalize(k.unflatten(-1, (heads, -1)), dim=-1).to(v.dtype).flatten(2)
        near = self._near(torch.cat([k, v], dim=-1)[:, :count].unflatten(1, size))
        k_near, v_near = near.unflatten(-1, (2, heads, -1)).permute(3, 1, 4, 2, 0, 5)
        near = (k_near @ q[..., None]).squeeze(-1) + self.near_bias  # (B, h, N, K)
        near = near.masked_fill(~exists, float("-inf"))

        k, v = (split_heads(part[:, count:], heads) for part in (k, v))
        far = q @ k.mT + self.position(size, pooled)

        weights = torch.cat([near, far], dim=-1).softmax(dim=-1)
        near, far = weights.split((self.window**2, far.shape[-1]), dim=-1)
        near = near + queries @ self.learnt_tokens + self.learnt_bias
        mixed = (near[..., None, :] @ v_near).squeeze(-2) + far @ v
        return self.proj(merge_heads(mixed)).unflatten(1, size)

    def _near(self, x: Tensor) -> Tensor:
        """Return each token's neighbours, zeros outside: (B, H, W, D) -> (K, B, N, D)."""
        return gather(x, self.window, 1).flatten(2, 3)

    def _pool(self, x: Tensor, pooled: Size) -> Tensor:
        """Return the tokens of the pooled map: (B, H, W, C) -> (B, M, C)."""
        maps = F.adaptive_avg_pool2d(F.gelu(self.pool_proj(to_nchw(x))), pooled)
        return self.norm(to_nhwc(maps).flatten(1, 2))


class AggregatedAttention(Mixer):
    """Attention with a fovea: pooled, or to all tokens without a reduction.

    Args:
        dim: Channels C.
        heads: h.
        grid: Map size (H, W) that offsets are divided by.
        window: Side of the neighbourhood, odd.
        reduction: r.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size.
    """

    def __init__(self, dim: int, heads: int, grid: Size, window: int, reduction: int) -> None:
        super().__init__()
        self.attn: Mixer = (
            FullAttention(dim, heads, grid)
            if reduction == 1
            else PooledAttention(dim, heads, grid, window, reduction)
        )
        init_fan_out(self)

    def mix(self, x: Tensor) -> Tensor:
        """Attend to neighbours and a pooled map: (B, H, W, C) -> (B, H, W, C)."""
        return self.attn.mix(x)


@register_mixer("aggregated", kind="token", source="TransNeXt (CVPR 2024)")
def aggregated(
    dim: int,
    *,
    grid: Size,
    slot: Slot | None = None,
    num_heads: int | None = None,
    window: int = 3,
    reduction: int | None = None,
) -> AggregatedAttention:
    """Build TransNeXt's aggregated attention; class tokens are not mixed: the host pools its map.

    The table of offsets is computed for each map size, in units of the map size that the host was
    built for. The pooled map has H / r x W / r tokens, rounded down to at least one. A host of one
    stage counts as the first; for its 14 x 14 tokens type ``reduction=2``.

    Args:
        dim: Channels C.
        grid: Map size (H, W).
        slot: Place in the host; its stage sets the reduction.
        num_heads: h, a divisor of C; by default as many as leave each 24 channels or more.
        window: Side of the neighbourhood, odd.
        reduction: r, by which the pooled map is smaller; by default 8, 4, 2 or 1 by stage.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 5 C + h (513 + 1) + 1536;
    with r > 1 also C^2 + 12 C + 18 h at windows of 3.

    Raises:
        ValueError: A reduction below 1, an even window, or ``num_heads`` that does not divide C.

    Source: TransNeXt (CVPR 2024), https://arxiv.org/abs/2311.17132.
    """
    check_odd(window)
    side = REDUCTIONS[min(slot.stage if slot else 0, 3)] if reduction is None else reduction
    check_range("reduction", side, 1)
    return AggregatedAttention(dim, usual_heads(dim, num_heads, HEAD_DIM), grid, window, side)
