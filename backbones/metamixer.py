"""MetaMixer: attention, FFN, spatial MLP, ConvNeXt block and FFNified attention as one structure.

    q = query(x),  (k, v) = memory(x),  c = activation(match(q, k)),  y = read(c, v)

Five slots are left open: query projection, key-value generation, query-key interaction, activation
and coefficient-value interaction. The coefficients c say how much of each value is read; analyses
of them work on every mixer alike.

A static key is an operator, not a tensor: with train-time branches it is a sum of convolutions with
BatchNorm, whose statistics depend on its output. So a static memory gives two operators, which
``apply`` runs; a projected memory gives two tensors, which functions of two tensors take.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design", Eq. 4, Fig. 1,
App. B and Fig. 8.

Axes: B images, H W map, N = H * W tokens, C channels, h heads, M hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.layouts import to_nchw, to_nhwc

Size = tuple[int, int]


class StaticMemory(nn.Module):
    """Keys and values that are weights: two operators, the same for every input."""

    projected = False

    def __init__(self, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.key, self.value = key, value

    def forward(self, x: Tensor) -> tuple[nn.Module, nn.Module]:
        """Any input -> the operators ``key`` and ``value``."""
        return self.key, self.value


class ProjectedMemory(nn.Module):
    """Keys and values of each input, by one linear layer, split into heads.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C.
        bias: Of the linear layer.

    Shape: (B, N, C) -> two of (B, h, N, C / h).
    """

    projected = True

    def __init__(self, dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = nn.Linear(dim, 2 * dim, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, C) -> keys and values (B, h, N, C / h)."""
        keys, values = self.proj(x).chunk(2, dim=-1)
        return split_heads(keys, self.num_heads), split_heads(values, self.num_heads)


class MetaMixer(Mixer):
    """Five slots in a row, between a change of layout and its way back.

    Args:
        query: Projects what ``enter`` gives; ``nn.Identity()`` where the input is the query.
        memory: ``StaticMemory`` or ``ProjectedMemory``, from the same input as the query.
        match: (q, k) -> scores.
        activation: Scores -> coefficients.
        read: (c, v) -> output.
        fused: (q, k, v) -> output in one kernel, the same function as match, activation and read;
            ``coefficients`` still goes the open way.
        enter: (B, H, W, C) -> the layout of the slots.
        leave: (output, (H, W)) -> (B, H, W, C).

    Shape: (B, H, W, C) -> (B, H, W, C).

    Raises:
        ValueError: An interaction that does not fit the memory.
    """

    def __init__(
        self,
        *,
        query: nn.Module,
        memory: StaticMemory | ProjectedMemory,
        match: Callable[[Tensor, Any], Tensor],
        activation: nn.Module,
        read: Callable[[Tensor, Any], Tensor],
        fused: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor, Size], Tensor],
    ) -> None:
        super().__init__()
        for slot, interaction in (("match", match), ("read", read)):
            if memory.projected and interaction is apply:
                raise ValueError(
                    f"{slot}=apply runs an operator, but a ProjectedMemory gives tensors: give "
                    "a function of two tensors, such as scaled_products"
                )
            if not memory.projected and interaction is not apply:
                raise ValueError(
                    f"a StaticMemory gives operators, which only apply can run: {slot} must be "
                    f"apply, got {getattr(interaction, '__name__', interaction)}"
                )
        if fused is not None and not memory.projected:
            raise ValueError("fused takes keys and values as tensors: it needs a ProjectedMemory")
        self.query, self.memory, self.activation = query, memory, activation
        self.match, self.read, self.fused = match, read, fused
        self.enter, self.leave = enter, leave

    def coefficients(self, x: Tensor) -> tuple[Tensor, Any]:
        """(B, H, W, C) -> the coefficients in the layout of the slots, and the values."""
        z = self.enter(x)
        keys, values = self.memory(z)
        return self.activation(self.match(self.query(z), keys)), values

    def mix(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        if self.fused is None:
            return self.leave(self.read(*self.coefficients(x)), size)
        z = self.enter(x)
        return self.leave(self.fused(self.query(z), *self.memory(z)), size)


# Interactions


def apply(x: Tensor, operator: nn.Module) -> Tensor:
    """Interaction with a static key or value: run it."""
    return operator(x)


def scaled_products(queries: Tensor, keys: Tensor) -> Tensor:
    """(..., N, d), (..., K, d) -> q k^T / sqrt(d), (..., N, K)."""
    return (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)


def weighted_sum(coefficients: Tensor, values: Tensor) -> Tensor:
    """(..., N, K), (..., K, d) -> (..., N, d)."""
    return coefficients @ values


# Layouts


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, C) -> (B, h, N, C / h)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def as_is(x: Tensor, size: Size | None = None) -> Tensor:
    """Enter or leave where the slots work on (B, H, W, C)."""
    return x


def from_nchw(x: Tensor, size: Size) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C), as a view."""
    return to_nhwc(x)


def to_tokens(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, N, C)."""
    return x.flatten(1, 2)


def to_rows(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, N): every channel a row of tokens."""
    return x.flatten(1, 2).transpose(1, 2)


def from_rows(x: Tensor, size: Size) -> Tensor:
    """(B, C, N) -> (B, H, W, C)."""
    return x.transpose(1, 2).unflatten(1, size)


class HeadQuery(nn.Module):
    """A linear query, split into heads: (B, N, C) -> (B, h, N, C / h)."""

    def __init__(self, dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, h, N, C / h)."""
        return split_heads(self.proj(x), self.num_heads)


class MergeHeads(nn.Module):
    """Heads side by side, and the output projection: (B, h, N, C / h) -> (B, H, W, C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """(B, h, N, C / h) and (H, W) -> (B, H, W, C)."""
        return self.proj(x.transpose(1, 2).flatten(2)).unflatten(1, size)


# Instances


def self_attention(dim: int, num_heads: int, qkv_bias: bool = True) -> MetaMixer:
    """Multi-head self-attention over all tokens of the map, without positions.

    Interaction over tokens, coefficients (B, h, N, N); the fused kernel never holds them.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """
    if num_heads < 1 or dim % num_heads:
        valid = [h for h in range(1, dim + 1) if dim % h == 0]
        raise ValueError(f"num_heads must divide {dim}: one of {valid}, got {num_heads}")
    return MetaMixer(
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
    """The FFN: static keys W1 and values W2, interaction over channels.

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
    """The spatial MLP of MLP-Mixer: an FFN over the N tokens, shared by all channels.

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
    """Operators on (B, C, H, W) maps as query, static key and static value, GELU between.

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
    """A depthwise query convolution (C -> C), then an FFN of 1x1 convolutions of ``hidden``."""
    return convolutional(query, nn.Conv2d(dim, hidden, 1), nn.Conv2d(hidden, dim, 1))


class _FixedTokens(nn.Module):
    """Passes rows of N tokens and refuses others."""

    def __init__(self, grid: Size) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, N) -> (B, C, N)."""
        height, width = self.grid
        if x.shape[-1] != height * width:
            raise ValueError(
                f"a spatial MLP has a weight per token: it was built for maps of {height}x{width}, "
                f"{height * width} tokens, and cannot run on {x.shape[-1]}; build it "
                "for that size, or use a mixer for any size such as ffnified"
            )
        return x
