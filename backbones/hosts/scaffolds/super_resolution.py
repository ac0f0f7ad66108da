"""Base class of hosts that enlarge images: one map at stride 1, and the layers that enlarge it.

Images are RGB from 0 to 1. The layers behind the map depend on the scale, so a head adds them by
``Backbone.upsampler``, as classifiers are added by ``Backbone.classifier``.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo
from backbones.mixer import PointwiseMixer
from backbones.registry import register_host

MODALITY = "low_resolution_image"
PATCH = 64  # side of the usual training images
MEAN = (0.4488, 0.4371, 0.4040)  # of DIV2K's training images
SCALES = (2, 3, 4)
UPSAMPLER = "upsampler."
register_enlarger = functools.partial(
    register_host, modality=MODALITY, patch_size=1, img_size=(PATCH, PATCH)
)


class Upsampler(nn.Module, ABC):
    """Layers from a map to an enlarged image.

    Shape: features (B, C, H, W) and images (B, 3, H, W) -> (B, 3, r H, r W).
    """

    @abstractmethod
    def forward(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the enlarged images (B, 3, r H, r W)."""


class SuperResolutionBackbone(Backbone, ABC):
    """Backbone with one map at stride 1; a subclass defines ``forward`` and ``upsampler``.

    Attributes:
        radius: Distance in low-resolution pixels over which an output depends on an input; None if
            it depends on all, or on the position within the image.
        scales: Scales of ``upsampler``.
    """

    classification_keys = (UPSAMPLER,)
    size_divisor = 1
    probed_side = 16
    radius: int | None = None
    scales: Sequence[int] = SCALES

    def set_width(self, width: int) -> None:
        """Declare the map of a number of channels."""
        self.num_features = width
        self.feature_info = (FeatureInfo(width, 1),)

    def set_radius(self, radius: int) -> None:
        """Declare the radius of the host's own layers; replaced mixers must be pointwise."""
        if all(isinstance(mixer, PointwiseMixer) for mixer in self.mixers().values()):
            self.radius = radius

    @abstractmethod
    def upsampler(self, scale: int) -> Upsampler:
        """Build the layers from the map to images of ``scale`` times the size."""

    def check_scale(self, scale: int) -> int:
        """Return a scale that the host has layers for.

        Raises:
            ValueError: It lacks one.
        """
        if scale not in self.scales:
            raise ValueError(
                f"data.scale={scale}: {self.name or type(self).__name__} enlarges "
                f"{', '.join(map(str, self.scales))} times; pass one of these"
            )
        return scale

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean over the map: (B, 3, H, W) -> (B, num_features)."""
        return self(images)[0].mean(dim=(2, 3))


class AnchoredUpsampler(Upsampler):
    """One convolution to r^2 shares per colour, each added to the input's colour.

    Without the convolution's share this is nearest-neighbour interpolation.

    Source: Du et al., "Anchor-based Plain Net for Mobile Image Super-Resolution", CVPRW 2021.
    """

    def __init__(self, width: int, scale: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 3 * scale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(scale)

    def forward(self, features: Tensor, images: Tensor) -> Tensor:
        """Return PixelShuffle(conv(features) + images, each colour r^2 times in a row)."""
        share = self.conv(features)
        repeats = share.shape[1] // images.shape[1]
        return self.shuffle(share + torch.repeat_interleave(images, repeats, dim=1))


class DirectUpsampler(Upsampler):
    """One convolution and a pixel shuffle, plus the mean colour."""

    def __init__(self, width: int, scale: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 3 * scale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(scale)

    def forward(self, features: Tensor, images: Tensor) -> Tensor:
        """Return PixelShuffle(conv(features)) + mean."""
        return self.shuffle(self.conv(features)) + mean_colour(images)


def mean_colour(like: Tensor) -> Tensor:
    """Return DIV2K's mean colour (1, 3, 1, 1) in the type and on the device of a tensor."""
    return like.new_tensor(MEAN).view(1, 3, 1, 1)


def rename_released(
    state_dict: Mapping[str, Tensor], names: Sequence[tuple[str, str]]
) -> dict[str, Tensor]:
    """Rename tensors by the first pattern that matches; an empty replacement drops a tensor.

    Args:
        state_dict: Tensors of a file.
        names: Regular expressions of whole names with their replacements.
    """
    renamed = {}
    for key, value in state_dict.items():
        match = next((pair for pair in names if re.fullmatch(pair[0], key)), None)
        name = key if match is None else re.sub(match[0], match[1], key)
        if name:
            renamed[name] = value
    return renamed
