"""Submanifold convolutions: convolutions of occupied voxels at occupied voxels.

They equal a dense convolution with zeros around the volume, read at the occupied voxels. A level of
voxels is sorted once; its pairs of neighbours serve all convolutions of one kernel size.

Axes: P voxels, C channels, k side of a kernel, K = k^3 offsets.

Source: Graham et al., "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks",
CVPR 2018, https://arxiv.org/abs/1711.10275.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from backbones.layers.precision import product_dtype
from backbones.options.values import check_odd

MARGIN = 4  # empty voxels between rows of the keys, so that neighbours never wrap around
MOST_KEYS = 2**62
Pairs = list[tuple[Tensor, Tensor]]


class VoxelLevel:
    """Occupied voxels of one resolution, sorted by batch, x, y and z.

    Args:
        grid: Batch index and integer coordinates of points (N, 4), at least 0; voxels may repeat.
        device: Of the indices; by default that of ``grid``. "meta" keeps only their shapes.

    Attributes:
        coords: Batch index and coordinates (P, 4) of the voxels, in order.
        inverse: Index of each point's voxel (N,).
        spconv: The level in spconv's form, once its convolutions have run; see
            ``fast/torch/submanifold``.

    Raises:
        ValueError: The points extend over more voxels than 64-bit integers can number.
    """

    def __init__(self, grid: Tensor, device: torch.device | None = None) -> None:
        sides = [int(side) + 1 + MARGIN for side in grid[:, 1:].amax(0)]
        if (int(grid[:, 0].amax()) + 1) * math.prod(sides) > MOST_KEYS:
            raise ValueError(
                f"the points extend over {' x '.join(map(str, sides))} voxels, more than can be "
                "numbered; remove outliers, or pass a larger data.grid_size"
            )
        strides = torch.tensor(
            [math.prod(sides), sides[1] * sides[2], sides[2], 1], device=grid.device
        )
        # The one sort of the level.
        keys, inverse = torch.unique((grid * strides).sum(1), return_inverse=True)
        self._keys, self._sides = keys, sides
        rows = [keys // strides[0]]
        for axis in range(3):
            rows.append(keys // strides[axis + 1] % sides[axis])
        self.coords = torch.stack(rows, dim=1)
        self._device = device or grid.device
        self.inverse = inverse.to(self._device)
        self._pairs: dict[int, Pairs] = {}
        self.spconv: Any = None

    def __len__(self) -> int:
        return len(self._keys)

    def coarser(self) -> VoxelLevel:
        """Return the level of voxels of twice the side; its ``inverse`` maps these voxels to it."""
        grid = torch.cat([self.coords[:, :1], self.coords[:, 1:] >> 1], dim=1)
        return VoxelLevel(grid, self._device)

    def pairs(self, kernel_size: int) -> Pairs:
        """Return the neighbours at the first half of a kernel's offsets, the last one first.

        Entry i belongs to offset i in the order of the kernel's elements. It holds the indices of
        centres and of their neighbours. The other half follows by exchanging both.
        """
        if kernel_size not in self._pairs:
            radius = kernel_size // 2
            steps = list(itertools.product(range(-radius, radius + 1), repeat=3))
            self._pairs[kernel_size] = [self._neighbours(step) for step in steps[: len(steps) // 2]]
        return self._pairs[kernel_size]

    def _neighbours(self, step: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        shift = (step[0] * self._sides[1] + step[1]) * self._sides[2] + step[2]
        keys = self._keys + shift
        positions = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        centres = torch.nonzero(self._keys[positions] == keys).flatten()
        return centres.to(self._device), positions[centres].to(self._device)


class _Products(torch.autograd.Function):
    """Sums of the offsets' products: x (P, C), weight (O, K, C) of one type -> (P, O).

    Half precision is summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return y[p] = sum over offsets of W[offset] x[p + offset]."""
        ctx.save_for_backward(x, weight)
        ctx.pairs = pairs
        y = _in_float32(x @ weight[:, len(pairs)].T)
        for offset, (centres, neighbours) in enumerate(pairs):
            first, last = weight[:, offset].T, weight[:, -1 - offset].T
            y.index_add_(0, centres, (x[neighbours] @ first).to(y.dtype))
            y.index_add_(0, neighbours, (x[centres] @ last).to(y.dtype))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and weight; gathered inputs are formed anew."""
        x, weight = ctx.saved_tensors
        half = len(ctx.pairs)
        grad_x = _in_float32(grad @ weight[:, half])
        grad_weight = torch.empty_like(weight)
        grad_weight[:, half] = grad.T @ x
        for offset, (centres, neighbours) in enumerate(ctx.pairs):
            for place, into, source in (
                (offset, centres, neighbours),
                (-1 - offset, neighbours, centres),
            ):
                gradient = grad[into]
                grad_x.index_add_(0, source, (gradient @ weight[:, place]).to(grad_x.dtype))
                grad_weight[:, place] = gradient.T @ x[source]
        return grad_x.to(x.dtype), grad_weight, None


def _in_float32(values: Tensor) -> Tensor:
    """Return half precision as float32, other types unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class SubmanifoldConv3d(nn.Module):
    """Dense or depthwise submanifold convolution of side k and stride 1.

    Args:
        dim: Channels C of the input.
        out_dim: Channels O of the output.
        kernel_size: k, odd.
        bias: True for a bias.
        groups: 1, or C for a kernel per channel.

    Shape: x (P, C) and their level -> (P, O). The weight is (O, k, k, k, C), as in spconv 2, and
    (C, k, k, k, 1) if depthwise.
    """

    def __init__(
        self, dim: int, out_dim: int, kernel_size: int, *, bias: bool = True, groups: int = 1
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        if groups not in (1, dim) or (groups > 1 and dim != out_dim):
            raise ValueError(f"groups must be 1, or {dim} with as many outputs; got {groups}")
        self.kernel_size, self.groups = kernel_size, groups
        sides = (kernel_size,) * 3
        self.weight = nn.Parameter(torch.empty(out_dim, *sides, dim // groups))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and bias uniformly by the fan-in, as torch's convolutions do."""
        limit = self.weight[0].numel() ** -0.5
        nn.init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -limit, limit)

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Convolve the features of a level's voxels: (P, C) -> (P, O)."""
        pairs = level.pairs(self.kernel_size)
        weight = self.weight.flatten(1, 3)  # (O, K, C)
        if self.groups == 1:
            # Cast here, since autocast ends where a function of one's own begins.
            kind = product_dtype(x)
            y: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
                x.to(kind), weight.to(kind), pairs
            )
        else:
            y = _depthwise(x, weight.squeeze(-1), pairs)
        return y if self.bias is None else y + self.bias


def _depthwise(x: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """Return y[p] = sum over offsets of w[offset] * x[p + offset]: (P, C), (C, K) -> (P, C)."""
    y = _scaled(x, weight[:, len(pairs)])
    for offset, (centres, neighbours) in enumerate(pairs):
        y = y.index_add(0, centres, _scaled(x[neighbours], weight[:, offset]))
        y = y.index_add(0, neighbours, _scaled(x[centres], weight[:, -1 - offset]))
    return y


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    """Return x * w; on the meta device as products of matrices, which counting sees."""
    if x.is_meta:
        return torch.bmm(x.T.unsqueeze(2), weight[:, None, None]).squeeze(2).T
    return x * weight


def cell_max(x: Tensor, coarse: VoxelLevel) -> Tensor:
    """Return the maximum of the voxels in each coarser voxel: (P, C) -> (P', C)."""
    index = coarse.inverse.unsqueeze(1).expand_as(x)
    lowest = x.new_zeros(len(coarse), x.shape[1])
    return lowest.scatter_reduce(0, index, x, "amax", include_self=False)
