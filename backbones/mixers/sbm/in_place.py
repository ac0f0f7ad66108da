"""Operations on tensors that nobody else needs, in their memory where no gradient is recorded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def silu(fresh: Tensor) -> Tensor:
    """SiLU of a tensor that nobody else needs."""
    return F.silu(fresh, inplace=not torch.is_grad_enabled())


def product(fresh: Tensor, other: Tensor) -> Tensor:
    """Product of two tensors, the first of which nobody else needs."""
    return fresh * other if torch.is_grad_enabled() else fresh.mul_(other)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer on some channels of (B, h, w, C), which as one matrix need not be copied."""
    return layer(x.flatten(0, 2)).unflatten(0, x.shape[:3])
