"""Feature maps at four strides from the single map of an isotropic backbone.

Source: Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection", ECCV 2022,
Sec. 3 and Fig. 2 ("simple feature pyramid").
"""

from __future__ import annotations

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from backbones.layers.graph_sizes import ceil_div, crop

PYRAMID_CHANNELS = 256
PYRAMID_STRIDES = (4, 8, 16, 32)


class SimpleFeaturePyramid(nn.Module):
    """Four maps at strides 4, 8, 16, 32 from one at stride 16, each with its own convolutions.

    Shape: (B, C, h, w) -> (B, 256, 4h, 4w), (B, 256, 2h, 2w), (B, 256, h, w),
        (B, 256, ceil(h/2), ceil(w/2)).

    Source: ViTDet, Sec. 3, with LayerNorm after each 1x1 and 3x3 convolution.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        half, quarter = dim // 2, dim // 4
        self.scales = nn.ModuleList(
            [
                _level(quarter, _up(dim, half), LayerNorm2d(half), nn.GELU(), _up(half, quarter)),
                _level(half, _up(dim, half)),
                _level(dim),
                _level(dim, nn.MaxPool2d(2, 2, ceil_mode=True)),
            ]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return one map at four scales: (B, C, h, w) -> four maps, fine to coarse."""
        return [scale(x) for scale in self.scales]

    def crop(self, x: Tensor, image_size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return the maps of ``forward`` without the padding of the last patches.

        For an image (H, W), each map has ceil(H / stride) rows and ceil(W / stride) columns.
        """
        height, width = image_size
        return tuple(
            crop(x, ceil_div(height, stride), ceil_div(width, stride)).contiguous()
            for x, stride in zip(self(x), PYRAMID_STRIDES, strict=True)
        )


def _up(in_channels: int, out_channels: int) -> nn.Module:
    return nn.ConvTranspose2d(in_channels, out_channels, kernel_size=2, stride=2)


def _level(channels: int, *resize: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        *resize,
        nn.Conv2d(channels, PYRAMID_CHANNELS, kernel_size=1, bias=False),
        LayerNorm2d(PYRAMID_CHANNELS),
        nn.Conv2d(PYRAMID_CHANNELS, PYRAMID_CHANNELS, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(PYRAMID_CHANNELS),
    )
