"""Batch norms on (..., C), as modules and, in inference, as the affine maps that they are."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from backbones.layers.eager import is_eager


def can_merge(x: Tensor, norm: nn.Module | None) -> bool:
    """Whether a batch norm may be merged into its neighbours: in eager inference only.

    A compiler merges better, and a count (on meta tensors, or by tracing) wants the operations
    that the paper has.
    """
    return not (
        torch.is_grad_enabled()
        or (norm is not None and (norm.training or not _is_affine(norm)))
        or x.is_meta
        or not is_eager(x)
    )


def _is_affine(norm: nn.Module) -> bool:
    """Whether a norm has statistics, and weights, of its own."""
    return getattr(norm, "running_mean", None) is not None and bool(norm.affine)


def normalise(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Batch norm over all axes but the last."""
    return x if norm is None else norm(x.flatten(0, -2)).view(x.shape)


def scale_and_shift(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The affine map that a batch norm is in evaluation: its scale s, and beta - s mean.

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
