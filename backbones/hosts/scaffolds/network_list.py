"""Base class of CycleMLP and Hire-MLP: a pyramid as one list of stages and transitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates, restride
from backbones.hosts.scaffolds.prenorm_block import PreNormBlock
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import missing
from backbones.layers.init import init_all
from backbones.slots import HostConfig, Slot

WIDTHS = (64, 128, 320, 512)
HIDDEN_RATIO = 4.0
# The authors' detectors number the norms of the maps by the stages' places in the list.
DENSE_NORMS = {f"norm{2 * stage}.": f"norm{stage}." for stage in range(4)}


class NetworkList(HierarchicalBackbone, ABC):
    """Stages of blocks (even entries of ``network``) and strided convolutions (odd entries).

    A subclass defines its norms, token mixers and FFNs. Images are padded with zeros to a multiple
    of the stem's stride, so that the first map keeps its last row and column.

    Args:
        config: See ``HostConfig``.
        depths: Blocks of the four stages.
    """

    embedding_norm = False

    def __init__(self, config: HostConfig, depths: Sequence[int]) -> None:
        super().__init__()
        self.set_maps(config, WIDTHS, self.norm_layer)
        self.patch_embed = Embedding(3, WIDTHS[0], 7, 4, 2, self.embedding_norm)
        restride(self.patch_embed, config)
        init_all(self.patch_embed)
        self.network = nn.ModuleList()
        places: list[tuple[PreNormBlock, Slot]] = []
        rates = drop_path_rates(config.drop_path_rate, sum(depths))
        for stage, (dim, depth) in enumerate(zip(WIDTHS, depths, strict=True)):
            if stage:
                transition = Embedding(WIDTHS[stage - 1], dim, 3, 2, 1, self.embedding_norm)
                init_all(transition)
                self.network.append(transition)
            grid = config.grid(self.feature_info[stage].stride)
            blocks = nn.Sequential()
            for index in range(depth):
                slot = Slot(dim, HIDDEN_RATIO, grid, stage, index, dense=config.dense)
                block = self._block(slot, rates.pop(0))
                places.append((block, slot))
                blocks.append(block)
            self.network.append(blocks)
        for block, slot in places:  # last, so that the host's weights are those without mixers
            block.fill_slots(slot, config)

    def _block(self, slot: Slot, drop_path: float) -> PreNormBlock:
        block = PreNormBlock(
            slot.dim,
            self.norm_layer,
            self.token_mixer(slot),
            self.ffn(slot.dim),
            drop_path=drop_path,
            channels_first=self.channels_first,
        )
        init_all(block)
        return block

    @abstractmethod
    def norm_layer(self, dim: int) -> nn.Module:
        """Build the norm of a block or map."""

    @abstractmethod
    def token_mixer(self, slot: Slot) -> nn.Module:
        """Build a block's token mixer for maps in the host's layout."""

    @abstractmethod
    def ffn(self, dim: int) -> nn.Module:
        """Build a block's FFN for maps in the host's layout."""

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> the four stage outputs in the host's layout, before any norm."""
        (height, width), stride = images.shape[-2:], self.patch_size
        images = F.pad(images, (0, missing(width, stride), 0, missing(height, stride)))
        x = self.patch_embed(images.contiguous(memory_format=torch.channels_last))
        maps: list[Tensor] = []
        for place, part in enumerate(self.network):
            if place % 2:
                x = part(x)
                continue
            maps.append(part(x if self.channels_first else to_nhwc(x)))
            x = maps[-1] if self.channels_first else to_nchw(maps[-1])
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors, of their classifier and of their dense backbone, to ours."""
        norms = DENSE_NORMS if any(key.startswith("norm6.") for key in state_dict) else {}
        renames = {"head.": "classifier.", **norms}
        converted = {}
        for key, value in state_dict.items():
            prefix = key.partition(".")[0] + "."
            converted[renames.get(prefix, prefix) + key.removeprefix(prefix)] = value
        return converted


class Embedding(nn.Module):
    """Strided convolution, in Hire-MLP with BatchNorm and ReLU.

    Shape: (B, D, H, W) -> (B, C, h, w).
    """

    def __init__(
        self, channels: int, dim: int, kernel: int, stride: int, padding: int, norm: bool
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel, stride, padding)
        self.norm = nn.BatchNorm2d(dim) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Embed a map: (B, D, H, W) -> (B, C, h, w)."""
        x = self.proj(x)
        return x if self.norm is None else F.relu(self.norm(x))
