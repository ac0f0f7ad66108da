"""A patch embedding and four blocks: mean pooling over 3x3 tokens, then a feed-forward network.

Source: an example; after Yu et al., "MetaFormer", CVPR 2022 (https://arxiv.org/abs/2111.11418).
"""

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.base import HostConfig, Slot, fill
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.isotropic import PATCH_SIZE, IsotropicBackbone
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nhwc
from backbones.layers.graph_sizes import missing
from backbones.mixers.ffn import FFN
from backbones.mixers.pooling import Pooling
from backbones.registry import register_host

WIDTH, DEPTH = 96, 4


class Block(nn.Module):
    """x + T(norm(x)), then x + F(norm(x)), on (B, H, W, C)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm1, self.token_mixer = nn.LayerNorm(WIDTH), Pooling(WIDTH)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), FFN(WIDTH)
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        x = x + self.drop_path(self.token_mixer(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class TinyPool(IsotropicBackbone):
    """One map at stride 16, or a pyramid made from it."""

    token_slots = ("token_mixer",)  # those of an attention are called "attn"

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, config.patch_size, config.patch_size)
        rates = drop_path_rates(config.drop_path_rate, DEPTH)
        self.blocks = nn.ModuleList(Block(rate) for rate in rates)
        self.set_map(config, WIDTH, nn.LayerNorm(WIDTH))
        for index, block in enumerate(self.blocks):  # last, after all own weights
            slot = Slot(WIDTH, 4.0, config.grid(config.patch_size), 0, index, dense=config.dense)
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "token_mixer", config.token_mixer, slot)

    def last_map(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, h, w, C) after the last block."""
        (height, width), patch = images.shape[-2:], self.patch_size
        padded = F.pad(images, (0, missing(width, patch), 0, missing(height, patch)))
        x = to_nhwc(self.stem(padded))
        for block in self.blocks:
            x = block(x)
        return x


@register_host("tiny_pool", source="an example", patch_size=PATCH_SIZE)
def tiny_pool(config: HostConfig) -> TinyPool:
    """Width 96, 4 blocks."""
    refuse_pretrained("tiny_pool", config)
    return TinyPool(config)
