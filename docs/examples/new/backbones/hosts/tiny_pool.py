"""Four stages of one block each: mean pooling over 3x3 tokens, then a feed-forward network.

Source: an example; after Yu et al., "MetaFormer", CVPR 2022 (https://arxiv.org/abs/2111.11418).
"""

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.base import HostConfig, Slot, fill
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import missing
from backbones.mixers.ffn import FFN
from backbones.mixers.pooling import Pooling
from backbones.registry import register_host

WIDTHS = (32, 64, 128, 256)


class Block(nn.Module):
    """x + T(norm(x)), then x + F(norm(x)), on (B, H, W, C)."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.token_mixer = nn.LayerNorm(width), Pooling(width)
        self.norm2, self.mlp = nn.LayerNorm(width), FFN(width)
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        x = x + self.drop_path(self.token_mixer(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class TinyPool(HierarchicalBackbone):
    """Maps at strides 4, 8, 16, 32."""

    token_slots = ("token_mixer",)  # those of an attention are called "attn"

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.steps = (config.patch_size, 2, 2, 2)
        self.patch_embeds = nn.ModuleList(
            nn.Conv2d(before, width, step, step)
            for before, width, step in zip((3, *WIDTHS), WIDTHS, self.steps, strict=False)
        )
        rates = drop_path_rates(config.drop_path_rate, len(WIDTHS))
        self.blocks = nn.ModuleList(map(Block, WIDTHS, rates))
        self.set_maps(config, WIDTHS)
        for stage, (block, info) in enumerate(zip(self.blocks, self.feature_info, strict=True)):
            # Last, after all own weights.
            grid = config.grid(info.stride)
            slot = Slot(info.channels, 4.0, grid, stage, 0, dense=config.dense)
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "token_mixer", config.token_mixer, slot)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> (B, h, w, C) after each stage."""
        maps, x = [], images
        for embed, block, step in zip(self.patch_embeds, self.blocks, self.steps, strict=True):
            height, width = x.shape[-2:]
            x = F.pad(x, (0, missing(width, step), 0, missing(height, step)))
            maps.append(block(to_nhwc(embed(x))))
            x = to_nchw(maps[-1])
        return maps


@register_host("tiny_pool", source="an example")
def tiny_pool(config: HostConfig) -> TinyPool:
    """Widths 32 to 256, one block per stage."""
    refuse_pretrained("tiny_pool", config)
    return TinyPool(config)
