"""Types of what an operator reads, under autocast and without."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products with this tensor are computed in: autocast's type where that is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def weight_dtype(x: Tensor) -> torch.dtype:
    """What the weights of a mixer that reads this tensor are: under autocast as they were built."""
    is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64
    return torch.float32 if is_cast else x.dtype


def for_products(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """A tensor and what it is multiplied with, as autocast would cast them."""
    dtype = product_dtype(x)
    return tuple(tensor.to(dtype) for tensor in (x, *operands))
