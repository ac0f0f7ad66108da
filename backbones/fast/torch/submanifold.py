"""Dense submanifold convolutions by spconv on a GPU, where it is installed (extra ``points``).

spconv keeps its table of neighbours with the level, so all convolutions of a resolution share it.
Its weights have our layout. No GPU has timed this form yet; on a CPU its outputs equal ours.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from backbones.fast.base import FastModule
from backbones.layers.sparse import SubmanifoldConv3d, VoxelLevel

TYPES = (torch.float16, torch.float32)


class FastSubmanifoldConv3d(FastModule, SubmanifoldConv3d):
    """spconv's convolution over the voxels of a level."""

    needs_operators = False

    @classmethod
    def may_serve(cls, module: Any) -> bool:
        """Return True for a dense convolution, if spconv is installed."""
        return module.groups == 1 and importlib.util.find_spec("spconv") is not None

    def serves(self, x: Tensor, level: VoxelLevel) -> bool:
        """Return True for features on a GPU, in a type that spconv has."""
        return x.is_cuda and x.dtype in TYPES

    def compute(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Convolve the features of a level's voxels: (P, C) -> (P, O)."""
        from spconv.pytorch import SparseConvTensor

        if level.spconv is None:
            sides = (level.coords[:, 1:].amax(0) + 1).tolist()
            batch = int(level.coords[-1, 0]) + 1
            level.spconv = SparseConvTensor(x, level.coords.int().contiguous(), sides, batch)
        layer = _layer(x.shape[1], len(self.weight), self.kernel_size)
        layer.weight = self.weight
        result = layer(level.spconv.replace_feature(x))
        level.spconv.indice_dict = result.indice_dict  # the table of neighbours
        y: Tensor = result.features
        return y if self.bias is None else y + self.bias


@functools.cache
def _layer(dim: int, out_dim: int, kernel_size: int) -> Any:
    """Return spconv's convolution of these sizes, which gets its weight with each call."""
    from spconv.pytorch import SubMConv3d

    return SubMConv3d(dim, out_dim, kernel_size, bias=False, indice_key=f"side {kernel_size}")
