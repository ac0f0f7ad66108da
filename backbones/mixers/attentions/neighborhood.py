"""Neighbourhood attention: each token attends to the k x k nearest tokens.

    y_i = W softmax(q_i K^T / sqrt d + B) V,  K and V of the neighbours of i

Near a border the neighbourhood moves inwards, so that it keeps its size. With dilation t it has
every t-th token, of those in the same row and column modulo t. B is read from a table by the offset
of two tokens.

Source: Hassani et al., "Neighborhood Attention Transformer", CVPR 2023,
https://arxiv.org/abs/2204.07143; dilation: Hassani and Shi, "Dilated Neighborhood Attention
Transformer", 2022, https://arxiv.org/abs/2209.15001. k = 7, 32 channels per head and truncated
normal values of 0.02 are those of the authors' code.

Axes: B images, H W map, N tokens, C channels, h heads of d channels, K = k^2 neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import ceil_div, is_any_size
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


def neighbours(
    length: int, kernel_size: int, dilation: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the neighbours of each place on an axis, k or as many as there are.

    Returns:
        Their places; their offsets in steps of the dilation, plus k - 1; and False where a class of
        places has fewer. Each (length, neighbours).
    """
    # A graph for any size keeps k columns, of which it masks what is missing.
    some = kernel_size if is_any_size((length,)) else min(kernel_size, ceil_div(length, dilation))
    place = torch.arange(length, device=device)
    step = place // dilation
    rest = place - step * dilation
    count = (length - rest + dilation - 1) // dilation  # of places in the same class
    first = torch.minimum(step - kernel_size // 2, count - kernel_size).clamp(min=0)
    steps = first[:, None] + torch.arange(some, device=device)
    exists = steps < count[:, None]
    steps = torch.where(exists, steps, step[:, None])
    return rest[:, None] + dilation * steps, steps - step[:, None] + kernel_size - 1, exists


@register_mixer("neighborhood", kind="token", source="NAT (CVPR 2023)")
class NeighborhoodAttention(Mixer):
    """W softmax(q_i K^T / sqrt d + B) V over the neighbours of each token i.

    The table belongs to the neighbourhood, so a map of any size uses it; on an axis of less than k
    tokens all are neighbours. Class tokens are not mixed: the host pools its map. Keys and values
    are copied for each neighbourhood, which takes 2 K times the memory of the map.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.
        kernel_size: k, side of a neighbourhood, odd.
        dilation: t, distance of neighbours.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C + h (2 k - 1)^2.

    Raises:
        ValueError: An even side, a dilation below 1, or ``num_heads`` that does not divide C.

    Source: NAT (CVPR 2023), https://arxiv.org/abs/2204.07143.
    """

    no_weight_decay = ("rpb",)  # a keyword of the authors, which their released optimiser ignores

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        kernel_size: int = 7,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_range("dilation", dilation, 1)
        self.num_heads = usual_heads(dim, num_heads)
        self.side, self.dilation = kernel_size, dilation
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rpb = nn.Parameter(torch.empty(self.num_heads, *[2 * kernel_size - 1] * 2))
        nn.init.trunc_normal_(self.rpb, std=0.02)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend to the neighbours of each token: (B, H, W, C) -> (B, H, W, C)."""
        size, dim = (x.shape[1], x.shape[2]), x.shape[-1]
        index, bias = self._neighbourhoods(size, x.device)
        q, kv = self.qkv(x.flatten(1, 2)).split((dim, 2 * dim), dim=-1)
        near = kv.index_select(1, index.flatten()).unflatten(1, index.shape)
        k, v = near.unflatten(-1, (2, self.num_heads, -1)).permute(3, 0, 1, 4, 2, 5)
        queries = q.unflatten(-1, (self.num_heads, 1, -1))  # (B, N, h, 1, d)
        logits = (queries * queries.shape[-1] ** -0.5) @ k.mT + bias[:, :, None]
        mixed = logits.softmax(dim=-1) @ v
        return self.proj(mixed.flatten(2)).unflatten(1, size)

    def _neighbourhoods(self, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the neighbours of each token (N, K), and their bias (N, h, K)."""
        (rows, down, tops), (columns, right, lefts) = (
            neighbours(side, self.side, self.dilation, device) for side in size
        )
        index = rows[:, None, :, None] * size[1] + columns[None, :, None, :]
        bias = self.rpb[:, down[:, None, :, None], right[None, :, None, :]]
        exists = tops[:, None, :, None] & lefts[None, :, None, :]
        bias = bias.masked_fill(~exists, float("-inf"))
        return index.flatten(2).flatten(0, 1), bias.flatten(3).flatten(1, 2).transpose(0, 1)
