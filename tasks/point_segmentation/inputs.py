"""Inputs to time networks for points on, which random numbers cannot stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.hosts.scaffolds.points import flat_square
from tasks.point_segmentation.family import FAMILY


def clouds(batch: int, shape: Sequence[int]) -> Tensor:
    """Return flat squares of voxels with random features, as counting uses them: (B, N, 3 + F)."""
    count, channels = shape
    assert FAMILY.counted is not None
    side = FAMILY.counted.targets["grid_size"]
    places = flat_square(batch, count)[:, 1:].unflatten(0, (batch, count))
    return torch.cat([side * (places + 0.5), torch.randn(batch, count, channels - 3)], dim=2)
