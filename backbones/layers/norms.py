"""Batch norms on (..., C), and the affine maps that they are in evaluation."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def normalise(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Apply a batch norm over all axes but the last; None is the identity."""
    return x if norm is None else norm(x.flatten(0, -2)).view(x.shape)


def scale_and_shift(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch norm in evaluation as an affine map: its scale s, and beta - s mean.

    Args:
        norm: None is the identity.
        x: (..., C), for the shape and type of the identity.

    Returns:
        Two of (C,).
    """
    if norm is None:
        return x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1])
    bn = cast("nn.BatchNorm1d", norm)
    scale = bn.weight * torch.rsqrt(cast("Tensor", bn.running_var) + bn.eps)
    return scale, torch.addcmul(bn.bias, cast("Tensor", bn.running_mean), scale, value=-1)
