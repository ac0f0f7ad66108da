"""EDSR-baseline: residual blocks of two 3x3 convolutions, a baseline of super-resolution.

Source: Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", CVPRW 2017,
https://arxiv.org/abs/1707.02921, Sec. 3 and Table 1. Colours are scaled to 255 inside, after the
mean of DIV2K is taken off. Checkpoints of the authors and of BasicSR load.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.hosts.scaffolds.super_resolution import (
    SuperResolutionBackbone,
    Upsampler,
    mean_colour,
    register_enlarger,
    rename_released,
)
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.slots import HostConfig

WIDTH, DEPTH, RANGE = 64, 16, 255
TENSOR = r"(weight|bias)"
RELEASED = [
    # The authors' names.
    (rf"(sub|add)_mean\.{TENSOR}", ""),
    (rf"head\.0\.{TENSOR}", r"stem.\1"),
    (rf"body\.(\d+)\.body\.0\.{TENSOR}", r"blocks.\1.conv1.\2"),
    (rf"body\.(\d+)\.body\.2\.{TENSOR}", r"blocks.\1.conv2.\2"),
    (rf"body\.{DEPTH}\.{TENSOR}", r"conv_after.\1"),
    (rf"tail\.0\.(\d)\.{TENSOR}", r"upsampler.stages.\1.\2"),
    (rf"tail\.1\.{TENSOR}", r"upsampler.last.\1"),
    # BasicSR's.
    (rf"conv_first\.{TENSOR}", r"stem.\1"),
    (rf"body\.(\d+)\.conv(\d)\.{TENSOR}", r"blocks.\1.conv\2.\3"),
    (rf"conv_after_body\.{TENSOR}", r"conv_after.\1"),
    (rf"upsample\.(\d)\.{TENSOR}", r"upsampler.stages.\1.\2"),
    (rf"conv_last\.{TENSOR}", r"upsampler.last.\1"),
]


class EDSR(SuperResolutionBackbone):
    """One map at stride 1: x + conv(blocks(x)) of x = conv(255 (image - mean))."""

    block_layout = "nchw"
    token_slots = channel_slots = ()
    radius = 2 * DEPTH + 5  # of two convolutions per block, and of those around them

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.dense = config.dense
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(DEPTH))
        self.conv_after = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.set_width(WIDTH)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the map (B, 64, H, W) of images (B, 3, H, W)."""
        x = y = self.stem(RANGE * (images - mean_colour(images)))
        for block in self.blocks:
            y = block(y)
        return (x + self.conv_after(y),)

    def upsampler(self, scale: int) -> EDSRUpsampler:
        """Build a convolution and pixel shuffle per factor of 2 or 3, and the last convolution."""
        return EDSRUpsampler(self.check_scale(scale))

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' or BasicSR's tensors to ours."""
        if "stem.weight" in state_dict:
            return state_dict
        return rename_released(state_dict, RELEASED)


class ResidualBlock(nn.Module):
    """x + conv(ReLU(conv(x))): (B, C, H, W) -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + conv2(ReLU(conv1(x)))."""
        return x + self.conv2(F.relu(self.conv1(x)))


class EDSRUpsampler(Upsampler):
    """Twice x2 for a scale of 4, else the scale at once; then a convolution to colours."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        factors = [2] * round(math.log2(scale)) if scale % 2 == 0 else [scale]
        self.stages = nn.Sequential()
        for factor in factors:
            self.stages.append(nn.Conv2d(WIDTH, WIDTH * factor**2, 3, padding=1))
            self.stages.append(nn.PixelShuffle(factor))
        self.last = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the enlarged images (B, 3, r H, r W)."""
        return self.last(self.stages(features)) / RANGE + mean_colour(images)


@register_enlarger("edsr_baseline", slots=(), source="EDSR, Table 1")
def edsr_baseline(config: HostConfig) -> EDSR:
    """Width 64, 16 blocks."""
    refuse_pretrained("edsr_baseline", config)
    return EDSR(config)
