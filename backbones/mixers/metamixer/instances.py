"""Attention, FFN, spatial MLP, ConvNeXt block and FFNified attention as instances of MetaMixer.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, App. B, Fig. 8.

Axes: B images, H W map, N = H * W tokens, C channels, h heads, M hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixers.metamixer.query_key_value import (
    MetaMixer,
    ProjectedMemory,
    Size,
    StaticMemory,
    apply,
)

# Interactions


def scaled_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return scores q k^T / sqrt(d): (..., N, d) and (..., K, d) -> (..., N, K)."""
    return (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)


def weighted_sum(coefficients: Tensor, values: Tensor) -> Tensor:
    """Sum values by their coefficients: (..., N, K) and (..., K, d) -> (..., N, d)."""
    return coefficients @ values


# Layouts


def as_is(x: Tensor, size: Size | None = None) -> Tensor:
    """Enter or leave where the slots work on (B, H, W, C)."""
    return x


def from_nchw(x: Tensor, size: Size) -> Tensor:
    """Leave NCHW by a view: (B, C, H, W) -> (B, H, W, C)."""
    return to_nhwc(x)


def to_tokens(x: Tensor) -> Tensor:
    """Enter where the slots work on tokens: (B, H, W, C) -> (B, N, C)."""
    return x.flatten(1, 2)


def to_rows(x: Tensor) -> Tensor:
    """Enter where every channel is a row of tokens: (B, H, W, C) -> (B, C, N)."""
    return x.flatten(1, 2).transpose(1, 2)


def from_rows(x: Tensor, size: Size) -> Tensor:
    """Leave where every channel is a row of tokens: (B, C, N) -> (B, H, W, C)."""
    return x.transpose(1, 2).unflatten(1, size)


class HeadQuery(nn.Module):
    """A linear query, split into heads: (B, N, C) -> (B, h, N, C / h)."""

    def __init__(self, dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b, split into heads: (B, N, C) -> (B, h, N, C / h)."""
        return split_heads(self.proj(x), self.num_heads)


class MergeHeads(nn.Module):
    """Heads side by side, and the output projection: (B, h, N, C / h) -> (B, H, W, C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """Return W [heads] + b as a map: (B, h, N, C / h) and (H, W) -> (B, H, W, C)."""
        return self.merge(x).unflatten(1, size)

    def merge(self, x: Tensor) -> Tensor:
        """Return W [heads] + b as tokens: (B, h, N, C / h) -> (B, N, C)."""
        return self.proj(merge_heads(x))


# Instances


class SelfAttention(MetaMixer):
    """Self-attention, in which prefix tokens are tokens among those of the map."""

    prefix_mixing = "joint"
    ignores_order = True
    leave: MergeHeads
    fused: Callable[[Tensor, Tensor, Tensor], Tensor]

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Attend over all tokens: (B, H, W, C) and (B, P, C) -> both."""
        z = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        y = self.leave.merge(self.fused(self.query(z), *self.memory(z)))
        count = prefix.shape[1]
        return y[:, count:].unflatten(1, x.shape[1:3]), y[:, :count]


def self_attention(dim: int, num_heads: int, qkv_bias: bool = True) -> SelfAttention:
    """Build multi-head self-attention over all tokens of the map, without positions.

    Interaction over tokens, coefficients (B, h, N, N); the fused kernel never holds them.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """
    num_heads = usual_heads(dim, num_heads)
    return SelfAttention(
        query=HeadQuery(dim, num_heads, qkv_bias),
        memory=ProjectedMemory(dim, num_heads, qkv_bias),
        match=scaled_products,
        activation=nn.Softmax(dim=-1),
        read=weighted_sum,
        fused=F.scaled_dot_product_attention,
        enter=to_tokens,
        leave=MergeHeads(dim),
    )


def feed_forward(dim: int, hidden: int) -> MetaMixer:
    """Build the FFN: static keys W1 and values W2, interaction over channels.

    Coefficients (B, H, W, M).
    """
    return MetaMixer(
        query=nn.Identity(),
        memory=StaticMemory(nn.Linear(dim, hidden), nn.Linear(hidden, dim)),
        match=apply,
        activation=nn.GELU(),
        read=apply,
        enter=as_is,
        leave=as_is,
    )


def spatial_mlp(grid: Size, hidden: int) -> MetaMixer:
    """Build the spatial MLP of MLP-Mixer: an FFN over the N tokens, shared by all channels.

    Coefficients (B, C, M). Its weights belong to one number of tokens, so maps of another are
    refused.
    """
    tokens = grid[0] * grid[1]
    return MetaMixer(
        query=_FixedTokens(grid),
        memory=StaticMemory(nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)),
        match=apply,
        activation=nn.GELU(),
        read=apply,
        enter=to_rows,
        leave=from_rows,
    )


def convolutional(query: nn.Module, key: nn.Module, value: nn.Module) -> MetaMixer:
    """Build a mixer of operators on (B, C, H, W): query, static key and value, GELU between.

    With a depthwise query and 1x1 key and value it is the ConvNeXt block, without its norm and
    residual: interaction over channels, coefficients (B, M, H, W). With a 1x1 query and depthwise
    key and value it is FFNified attention: interaction over space, coefficients (B, C, H, W).
    """
    return MetaMixer(
        query=query,
        memory=StaticMemory(key, value),
        match=apply,
        activation=nn.GELU(),
        read=apply,
        enter=to_nchw,
        leave=from_nchw,
    )


def convnext_block(query: nn.Module, dim: int, hidden: int) -> MetaMixer:
    """Build a depthwise query convolution (C -> C), then an FFN of 1x1 convolutions."""
    return convolutional(query, PointwiseConv2d(dim, hidden), PointwiseConv2d(hidden, dim))


class _FixedTokens(nn.Module):
    """Passes rows of N tokens and refuses others."""

    def __init__(self, grid: Size) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows themselves: (B, C, N) -> (B, C, N)."""
        height, width = self.grid
        if x.shape[-1] != height * width:
            raise ValueError(
                f"a spatial MLP has a weight per token: it was built for maps of {height}x{width}, "
                f"{height * width} tokens, and cannot run on {x.shape[-1]}; build it "
                "for that size, or use a mixer for any size such as ffnified"
            )
        return x
