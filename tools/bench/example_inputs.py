"""Inputs to time networks on that random numbers cannot stand for: words and clouds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.hosts.scaffolds.points import flat_square
from tasks.engine.family import find_family


def words(batch: int, shape: Sequence[int]) -> Tensor:
    """Return texts of the first word, whose embedding takes as long as any other: (B, L)."""
    return torch.zeros(batch, *shape)


def clouds(batch: int, shape: Sequence[int]) -> Tensor:
    """Return flat squares of voxels with random features, as counting uses them: (B, N, 3 + F)."""
    count, channels = shape
    counted = find_family("point_segmentation").counted
    assert counted is not None
    side = counted.targets["grid_size"]
    places = flat_square(batch, count)[:, 1:].unflatten(0, (batch, count))
    return torch.cat([side * (places + 0.5), torch.randn(batch, count, channels - 3)], dim=2)
