"""MetaMixer: attention, FFN, spatial MLP, ConvNeXt block and FFNified attention as one structure.

    q = query(x),  (k, v) = memory(x),  c = activation(match(q, k)),  y = read(c, v)

Five slots are left open: query projection, key-value generation, query-key interaction, activation
and coefficient-value interaction. The coefficients c say how much of each value is read; analyses
of them work on every mixer alike.

A static key is an operator, not a tensor: with train-time branches it is a sum of convolutions with
BatchNorm, whose statistics depend on its output. So a static memory gives two operators, which
``apply`` runs; a projected memory gives two tensors, which functions of two tensors take.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Eq. 4, Fig. 1, App. B and Fig. 8.

Axes: B images, H W map, N = H * W tokens, C channels, h heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from backbones.layers.heads import split_heads
from backbones.mixer import Mixer

Size = tuple[int, int]


class StaticMemory(nn.Module):
    """Keys and values that are weights: two operators, the same for every input."""

    projected = False

    def __init__(self, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.key, self.value = key, value

    def forward(self, x: Tensor) -> tuple[nn.Module, nn.Module]:
        """Return the operators ``key`` and ``value``, for any input."""
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
        """Return keys and values of the input: (B, N, C) -> two of (B, h, N, C / h)."""
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

    Source: FFNet (2024), Eq. 4, https://arxiv.org/abs/2406.02021.
    """

    value_layer = "memory.value"

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
        runs_operators = (match is apply, read is apply)
        if runs_operators != (not memory.projected,) * 2 or (fused and not memory.projected):
            raise ValueError(
                "a StaticMemory gives operators, which only match=apply and read=apply run; a "
                "ProjectedMemory gives tensors, for functions of two tensors such as "
                "scaled_products, and for fused"
            )
        self.query, self.memory, self.activation = query, memory, activation
        self.match, self.read, self.fused = match, read, fused
        self.enter, self.leave = enter, leave

    def coefficients(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the coefficients of (B, H, W, C) in the layout of the slots, and the values."""
        z = self.enter(x)
        keys, values = self.memory(z)
        return self.activation(self.match(self.query(z), keys)), values

    def mix(self, x: Tensor) -> Tensor:
        """Return read(activation(match(q, k)), v): (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        if self.fused is None:
            return self.leave(self.read(*self.coefficients(x)), size)
        z = self.enter(x)
        return self.leave(self.fused(self.query(z), *self.memory(z)), size)


def apply(x: Tensor, operator: nn.Module) -> Tensor:
    """Run a static key or value: the interaction with it."""
    return operator(x)
