"""A linear layer by whoever is the fastest here; in a file that stands alone that is torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Whom to ask before torch: whether it serves a tensor, and what computes; the compiled operators
# enter theirs.
FASTER: list[tuple[Callable[[Tensor], bool], Product]] = []
# The same for a layer and the GELU behind it, of input, weight and bias.
FASTER_GELU: list[tuple[Callable[[Tensor, Tensor, Tensor | None], bool], Product]] = []


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + b: (..., C), (D, C) and (D,) -> (..., D)."""
    return (faster_linear(x) or F.linear)(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU(X W^T + b): (..., C), (D, C) and (D,) -> (..., D)."""
    for serves, product in FASTER_GELU:
        if serves(x, weight, bias):
            return product(x, weight, bias)
    return F.gelu(linear(x, weight, bias))


def faster_linear(x: Tensor) -> Product | None:
    """Who is faster than torch for this tensor, if anybody is."""
    return next((product for serves, product in FASTER if serves(x)), None)


class Linear(nn.Linear):
    """``nn.Linear`` by whoever is the fastest here: (..., C) -> (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        return linear(x, self.weight, self.bias)


def multiply_faster(module: nn.Module) -> None:
    """Let the plain linear layers of a module be ``Linear``; they stay the objects they are."""
    for part in module.modules():
        if type(part) is nn.Linear:
            cast("Any", part).__class__ = Linear
