"""Parts that keep their type under autocast."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.amp.autocast_mode import is_autocast_available


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off on a device, where it has one."""
    known = is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else contextlib.nullcontext()
