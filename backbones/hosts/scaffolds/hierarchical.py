"""Base class of hierarchical hosts: one norm per map for dense prediction, one for classes.

``patch_size`` is the stride of the first map in pixels. At the usual 4 the last map of an image of
32 pixels has a single position; at 1 the maps have sides of 32, 16, 8 and 4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo
from backbones.layers.axes import to_nchw
from backbones.slots import HostConfig

PATCH_SIZE = 4  # of all published ones


class HierarchicalBackbone(Backbone, ABC):
    """Maps at strides 4, 8, 16, 32. A subclass defines ``stage_maps`` and calls ``set_maps``.

    With another ``patch_size`` p the strides are p, 2 p, 4 p, 8 p; the subclass builds its stem for
    p, or calls ``restride``.

    Attributes:
        channels_first: True if stages and norms work on (B, C, h, w), False for (B, h, w, C).
        patch_size: Stride of the first map.
    """

    channels_first = False
    patch_size: int
    classification_keys: tuple[str, ...] = ("norm.",)
    map_keys: tuple[str, ...] = ("norm0.", "norm1.", "norm2.", "norm3.")

    def set_maps(
        self,
        config: HostConfig,
        widths: Sequence[int],
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        """Declare the maps, and build ``norm0`` to ``norm3`` if dense, otherwise ``norm``."""
        self.patch_size = config.patch_size
        strides = [config.patch_size * 2**stage for stage in range(len(widths))]
        self.feature_info = tuple(map(FeatureInfo, widths, strides))
        self.size_divisor = strides[-1]
        self.num_features = widths[-1]
        self.dense = config.dense
        if config.dense:
            for stage, width in enumerate(widths):
                self.add_module(f"norm{stage}", norm(width))
        else:
            self.norm = norm(widths[-1])

    @abstractmethod
    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> the stage outputs in the host's layout, before any norm."""

    def empty_maps(self, images: Tensor) -> list[Tensor]:
        """Return the stage outputs of an empty batch, for networks that divide by its size.

        Args:
            images: (0, 3, H, W).
        """
        height, width = images.shape[2:]
        maps = []
        for info in self.feature_info:
            size = -(-height // info.stride), -(-width // info.stride)
            shape = (info.channels, *size) if self.channels_first else (*size, info.channels)
            maps.append(images.new_empty(0, *shape))
        return maps

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return a map (B, C_i, ceil(H / s_i), ceil(W / s_i)) per stage of images (B, 3, H, W)."""
        maps = self.stage_maps(images)
        if self.dense:
            maps = [self.get_submodule(f"norm{i}")(x) for i, x in enumerate(maps)]
        if not self.channels_first:
            maps = [to_nchw(x) for x in maps]
        return tuple(x.contiguous() for x in maps)

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean over the normed last map: (B, 3, H, W) -> (B, num_features).

        Raises:
            ValueError: The backbone was built for dense prediction.
        """
        self.check_embeds()
        x = self.norm(self.stage_maps(images)[-1])
        return x.mean(dim=(2, 3) if self.channels_first else (1, 2))


def restride(stem: nn.Module, config: HostConfig) -> None:
    """Set the stride of a stem of overlapping kernels to ``config.patch_size``; weights stay.

    The strides of the last convolutions are reduced first, since the first one works on the largest
    map. The first map then has ceil(H / p) rows.
    """
    if config.patch_size == PATCH_SIZE:
        return
    layers = [m for m in stem.modules() if isinstance(m, nn.Conv2d) and m.stride[0] > 1]
    surplus = math.prod(layer.stride[0] for layer in layers) // config.patch_size
    for layer in reversed(layers):
        assert layer.kernel_size[0] > layer.stride[0], "kernels must overlap"
        cut = min(surplus, layer.stride[0])
        surplus //= cut
        if cut > 1:
            layer.stride = (layer.stride[0] // cut,) * 2
            layer.padding = (layer.kernel_size[0] // 2,) * 2


def drop_path_rates(rate: float, num_blocks: int) -> list[float]:
    """Return the stochastic depth of each block, rising linearly from 0 to ``rate``."""
    return torch.linspace(0, rate, num_blocks, device="cpu").tolist()
