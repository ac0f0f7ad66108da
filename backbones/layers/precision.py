"""The types that parts compute in, under autocast and in half precision, on any device."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

# torch.compile of torch 2.11 cannot trace the question, whose answer never changes.
is_autocast_available = torch.compiler.assume_constant_result(is_autocast_available)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off on a device, where it has one."""
    is_available = is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if is_available else contextlib.nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type that matrix products of a tensor are computed in, autocast's if it is on."""
    device = x.device.type
    casts = is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts and x.dtype is not torch.float64 else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
