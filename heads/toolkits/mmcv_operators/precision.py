"""What the operators share."""

from __future__ import annotations

import torch
from torch import Tensor

COMPILE = (
    "pip install 'setuptools>=80,<82' wheel ninja packaging psutil && "
    "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall onedl-mmcv"
)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in a precision that torchvision's operators take on every device."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
