"""Bicubic enlargement as a network without parameters, the baseline of super-resolution."""

from __future__ import annotations

import torch
from torch import Tensor

from backbones.hosts.scaffolds.super_resolution import (
    SuperResolutionBackbone,
    Upsampler,
    register_enlarger,
)
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.bicubic import MARGIN, enlarge
from backbones.slots import HostConfig


class Bicubic(SuperResolutionBackbone):
    """Its map is the image; the upsampler interpolates, at any scale."""

    token_slots = channel_slots = ()
    radius = MARGIN
    scales = range(2, 9)

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.dense = config.dense
        self.set_width(3)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the images (B, 3, H, W)."""
        return (images,)

    def upsampler(self, scale: int) -> BicubicUpsampler:
        """Return the interpolation."""
        return BicubicUpsampler(self.check_scale(scale))


class BicubicUpsampler(Upsampler):
    """Bicubic interpolation as MATLAB's imresize."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("factor", torch.tensor(scale))  # for checkpoints, which need a tensor

    def forward(self, features: Tensor, images: Tensor) -> Tensor:
        """Enlarge the images: (B, 3, H, W) -> (B, 3, r H, r W)."""
        return enlarge(images, self.scale)


@register_enlarger("bicubic", slots=(), source="MATLAB's imresize")
def bicubic(config: HostConfig) -> Bicubic:
    """Interpolate; nothing is trained."""
    refuse_pretrained("bicubic", config)
    return Bicubic(config)
