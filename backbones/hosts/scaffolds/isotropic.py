"""Base class of isotropic hosts: one map at stride 16, or a pyramid made from it.

``patch_size`` makes the patches smaller, for small images: 32 pixels have 8x8 patches of 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo
from backbones.layers.axes import to_nchw
from backbones.layers.feature_pyramid import (
    PYRAMID_CHANNELS,
    PYRAMID_STRIDES,
    SimpleFeaturePyramid,
)
from backbones.slots import HostConfig

PATCH_SIZE = 16  # of all published ones


class IsotropicBackbone(Backbone, ABC):
    """Backbone of constant width. A subclass defines ``last_map`` and calls ``set_map``.

    Attributes:
        patch_size: Side of the patches, and stride of the map.
    """

    patch_size: int

    size_divisor = PYRAMID_STRIDES[-1]
    classification_keys: tuple[str, ...] = ("norm.",)
    map_keys = tuple(f"pyramid.scales.{level}." for level in range(len(PYRAMID_STRIDES)))

    def set_map(self, config: HostConfig, width: int, norm: nn.Module) -> None:
        """Declare the map, and keep the final norm, or build the pyramid instead if dense."""
        self.num_features = width
        self.patch_size = config.patch_size
        self.dense = config.dense
        if config.dense:
            self.pyramid = SimpleFeaturePyramid(width)
            self.feature_info = tuple(FeatureInfo(PYRAMID_CHANNELS, s) for s in PYRAMID_STRIDES)
        else:
            self.norm = norm
            self.feature_info = (FeatureInfo(width, config.patch_size),)

    @abstractmethod
    def last_map(self, images: Tensor) -> Tensor:
        """Return the last block's output, before any norm: (B, 3, H, W) -> (B, h, w, C)."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the normed map of images (B, 3, H, W), or four maps of 256 channels if dense."""
        x = self.last_map(images)
        if not self.dense:
            return (to_nchw(self.norm(x)).contiguous(),)
        return self.pyramid.crop(to_nchw(x).contiguous(), (images.shape[-2], images.shape[-1]))

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean over all normed tokens: (B, 3, H, W) -> (B, num_features).

        Raises:
            ValueError: The backbone was built for dense prediction.
        """
        self.check_embeds()
        return self.norm(self.last_map(images)).mean(dim=(1, 2))
