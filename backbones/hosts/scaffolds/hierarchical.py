"""What hierarchical hosts share: a norm per map for dense prediction, one norm for classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo, HostConfig
from backbones.layers.axes import to_nchw


class HierarchicalBackbone(Backbone):
    """Maps at strides 4, 8, 16, 32. A subclass writes ``stage_maps`` and calls ``set_maps``.

    Attributes:
        channels_first: Whether stages and norms work on (B, C, h, w) instead of (B, h, w, C).
    """

    channels_first = False
    classification_keys: tuple[str, ...] = ("norm.",)
    map_keys: tuple[str, ...] = ("norm0.", "norm1.", "norm2.", "norm3.")

    def set_maps(
        self,
        config: HostConfig,
        widths: Sequence[int],
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> None:
        """Say what the stages give, and make the norms ``norm0`` to ``norm3``, or only ``norm``."""
        self.feature_info = tuple(map(FeatureInfo, widths, strides))
        self.num_features = widths[-1]
        self.dense = config.dense
        if config.dense:
            for stage, width in enumerate(widths):
                self.add_module(f"norm{stage}", norm(width))
        else:
            self.norm = norm(widths[-1])

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> the stage outputs in the host's layout, before any norm."""
        raise NotImplementedError

    def empty_maps(self, images: Tensor) -> list[Tensor]:
        """Stage outputs of a batch without images, for networks that divide by how many there are.

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
        """(B, 3, H, W) -> a map (B, C_i, ceil(H / s_i), ceil(W / s_i)) per stage."""
        maps = self.stage_maps(images)
        if self.dense:
            maps = [self.get_submodule(f"norm{i}")(x) for i, x in enumerate(maps)]
        if not self.channels_first:
            maps = [to_nchw(x) for x in maps]
        return tuple(x.contiguous() for x in maps)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_features): the norm, then the mean over the last map.

        Raises:
            ValueError: The backbone was built for dense prediction.
        """
        self.check_embeds()
        x = self.norm(self.stage_maps(images)[-1])
        return x.mean(dim=(2, 3) if self.channels_first else (1, 2))


def drop_path_rates(rate: float, num_blocks: int) -> list[float]:
    """Stochastic depth of each block, rising linearly from 0 to ``rate``."""
    return torch.linspace(0, rate, num_blocks, device="cpu").tolist()
