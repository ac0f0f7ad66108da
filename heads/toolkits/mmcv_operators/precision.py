"""Precision of the operators, and the command that compiles mmcv's."""

from __future__ import annotations

import torch
from torch import Tensor

COMPILE = (
    "pip install 'setuptools>=80,<82' wheel ninja packaging psutil && "
    "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall onedl-mmcv"
)


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in a precision that torchvision's operators support on every device."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
