"""Base class of hosts for point clouds.

Clouds are (B, N, 3 + F): coordinates in voxels, then F features such as colour and normal. Shorter
clouds of a batch are filled up with points whose coordinates are NaN.

Axes: B clouds, N points, P voxels, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from backbones.base import Backbone
from backbones.layers.sparse import VoxelLevel

MODALITY = "point_cloud"
FEATURES = 6  # colour and normal
POINTS = 102_400  # of the published crops
# What every such host passes to register_host.
POINT_HOST: dict[str, Any] = {"modality": MODALITY, "patch_size": 1, "img_size": POINTS}


class PointBackbone(Backbone, ABC):
    """Backbone from clouds (B, N, 3 + F) to one map (B, C, N); a subclass defines ``encode``.

    Points in one voxel share its features, which are the means of theirs. Multiply-adds depend on
    the number of neighbours, so on the meta device, where counting runs, the points are a flat
    square of voxels.
    """

    modality = MODALITY
    size_divisor = 1
    token_slots: tuple[str, ...] = ("token_mixer",)
    channel_slots: tuple[str, ...] = ("channel_mixer",)
    pooling = "mean over points"
    channels: int  # of an input point, besides its coordinates

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return clouds of voxels, most of which have neighbours."""
        coords, features = 4 * torch.rand(2, 64, 3), torch.rand(2, 64, self.channels)
        return (torch.cat([coords, features], dim=2),)

    @abstractmethod
    def encode(self, features: Tensor, level: VoxelLevel) -> Tensor:
        """Return the features of voxels: (P, F) -> (P, C)."""

    def cast_input(self, images: Tensor) -> Tensor:
        """Return clouds unchanged: coordinates form voxels before features are cast."""
        return images

    def map_shapes(self, images: Tensor) -> list[tuple[int, ...]]:
        """Return the shape (B, C, N) of the map for clouds (B, N, 3 + F)."""
        return [(images.shape[0], self.feature_info[0].channels, images.shape[1])]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the features of all points, zero for missing ones: (B, N, 3 + F) -> (B, C, N)."""
        return (self._point_features(images).transpose(1, 2),)

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean over the points of each cloud: (B, N, 3 + F) -> (B, C)."""
        x = self._point_features(images).sum(1)
        if images.is_meta:
            return x
        return x / present(images).sum(1, keepdim=True)

    def _point_features(self, images: Tensor) -> Tensor:
        count = images.shape[2] - 3
        if images.is_meta:
            level = VoxelLevel(flat_square(*images.shape[:2]), images.device)
            x = self._encode_points(images[..., 3:].flatten(0, 1), level)
            return x[level.inverse].unflatten(0, images.shape[:2])
        is_present = present(images)
        batch, point = torch.nonzero(is_present, as_tuple=True)
        points = images[batch, point]
        coords = points[:, :3].double().floor().long()
        index = batch.unsqueeze(1).expand_as(coords)
        lowest = coords.new_zeros(len(images), 3).scatter_reduce(
            0, index, coords, "amin", include_self=False
        )
        grid = torch.cat([batch[:, None], coords - lowest[batch]], dim=1)
        level = VoxelLevel(grid)
        x = self._encode_points(points[:, 3 : 3 + count], level)[level.inverse]
        return x.new_zeros(*images.shape[:2], x.shape[1]).index_put((batch, point), x)

    def _encode_points(self, features: Tensor, level: VoxelLevel) -> Tensor:
        """Return the features of voxels from those of points: (N, F) -> (P, C)."""
        return self.encode(super().cast_input(_voxel_means(features, level)), level)


def present(clouds: Tensor) -> Tensor:
    """Return True for each point that is not padding: (B, N, 3 + F) -> (B, N)."""
    return ~clouds[..., 0].isnan()


def flat_square(batch: int, count: int) -> Tensor:
    """Return the voxels (B * N, 4) of squares of N voxels in one plane."""
    side = max(1, round(count**0.5))
    places = torch.arange(count, device="cpu")
    flat = torch.stack([places * 0, places // side, places % side, places * 0], dim=1)
    return torch.cat([flat + torch.tensor([index, 0, 0, 0]) for index in range(batch)])


def _voxel_means(features: Tensor, level: VoxelLevel) -> Tensor:
    """Return the mean of each voxel's points: (N, F) -> (P, F)."""
    index = level.inverse.unsqueeze(1).expand_as(features)
    sums = features.new_zeros(len(level), features.shape[1])
    return sums.scatter_reduce(0, index, features, "mean", include_self=False)
