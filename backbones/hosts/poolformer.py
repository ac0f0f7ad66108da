"""PoolFormer S12 to M48 on timm's network, with the authors' head.

timm pools the last map and then normalises the vector; the authors normalise the map (one group
over channels and positions) and then pool. Parameter names agree, so weights load into either
network, but the logits differ. This file follows the authors.

Source: Yu et al., "MetaFormer Is Actually What You Need for Vision", CVPR 2022,
https://arxiv.org/abs/2111.11418, Table 1.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from timm.models.metaformer import MetaFormer, MetaFormerBlock
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, restride
from backbones.hosts.scaffolds.timm_source import create_timm_model, extend_all, read_source
from backbones.layers.graph_sizes import missing
from backbones.mixer import Mixer
from backbones.mixer_calls import mix_nchw
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill


class PoolFormer(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NCHW inside.

    Source: PoolFormer, https://arxiv.org/abs/2111.11418.
    """

    channels_first = True
    block_layout = "nchw"
    token_slots = ("token_mixer",)

    def __init__(self, model: MetaFormer, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.stem = model.stem
        restride(self.stem, config)
        self.stages = model.stages
        # timm's head norm has an epsilon of 1e-6, all of the authors' norms have 1e-5.
        self.set_maps(
            config, [info["num_chs"] for info in model.feature_info], partial(nn.GroupNorm, 1)
        )
        if not config.dense:
            self.norm.load_state_dict(model.get_submodule("head.norm").state_dict())
        self._fill_slots(config)

    def _fill_slots(self, config: HostConfig) -> None:
        for stage, layer in enumerate(self.stages):
            width, stride = self.feature_info[stage].channels, self.feature_info[stage].stride
            grid = config.grid(stride)
            for index, block in enumerate(
                extend_all(layer.get_submodule("blocks"), PoolFormerBlock)
            ):
                slot = Slot(width, 4.0, grid, stage, index, dense=config.dense)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "token_mixer", config.token_mixer, slot)
        # Mixers work on (B, H, W, C), which is a view of a channels_last map.
        swapped = any(isinstance(module, Mixer) for module in self.modules())
        self.memory_format = torch.channels_last if swapped else torch.contiguous_format

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, C, h, w) of images (B, 3, H, W), before any norm."""
        (height, width), stride = images.shape[-2:], self.patch_size
        images = F.pad(images, (0, missing(width, stride), 0, missing(height, stride)))
        x = self.stem(images).contiguous(memory_format=self.memory_format)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors (``network.N``, ``layer_scale_N``) and timm's to ours."""
        return rename(state_dict, RENAMES)


class PoolFormerBlock(MetaFormerBlock):
    """timm's block with slots for mixers."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply token mixer and FFN, each with its shortcut: (B, C, H, W) -> the same."""
        y = mix_nchw(self.token_mixer, self.norm1(x))
        x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(y))
        y = mix_nchw(self.mlp, self.norm2(x))
        return self.res_scale2(x) + self.layer_scale2(self.drop_path2(y))


# The authors' network alternates stages (even) and downsampling (odd) in one list.
RENAMES = (
    (r"^patch_embed\.proj\.", "stem.conv."),
    (r"^network\.0\.", "stages.0.blocks."),
    (r"^network\.2\.", "stages.1.blocks."),
    (r"^network\.4\.", "stages.2.blocks."),
    (r"^network\.6\.", "stages.3.blocks."),
    (r"^network\.1\.proj\.", "stages.1.downsample.conv."),
    (r"^network\.3\.proj\.", "stages.2.downsample.conv."),
    (r"^network\.5\.proj\.", "stages.3.downsample.conv."),
    (r"\.layer_scale_([12])$", r".layer_scale\1.scale"),
    (r"^head\.norm\.", "norm."),
    (r"^head\.(fc\.)?", "classifier."),
)


def _build(variant: str, config: HostConfig) -> PoolFormer:
    return PoolFormer(cast("MetaFormer", create_timm_model(variant, config)), config)


@register_host("poolformer_s12", source="PoolFormer, Table 1")
def poolformer_s12(config: HostConfig) -> PoolFormer:
    """Widths 64 to 512, depths 2, 2, 6, 2."""
    return _build("poolformer_s12", config)


@register_host("poolformer_s24", source="PoolFormer, Table 1")
def poolformer_s24(config: HostConfig) -> PoolFormer:
    """Widths 64 to 512, depths 4, 4, 12, 4."""
    return _build("poolformer_s24", config)


@register_host("poolformer_s36", source="PoolFormer, Table 1")
def poolformer_s36(config: HostConfig) -> PoolFormer:
    """Widths 64 to 512, depths 6, 6, 18, 6."""
    return _build("poolformer_s36", config)


@register_host("poolformer_m36", source="PoolFormer, Table 1")
def poolformer_m36(config: HostConfig) -> PoolFormer:
    """Widths 96 to 768, depths 6, 6, 18, 6."""
    return _build("poolformer_m36", config)


@register_host("poolformer_m48", source="PoolFormer, Table 1")
def poolformer_m48(config: HostConfig) -> PoolFormer:
    """Widths 96 to 768, depths 8, 8, 24, 8."""
    return _build("poolformer_m48", config)
