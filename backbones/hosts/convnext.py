"""ConvNeXt-T on timm's network, a baseline, at any image size.

Its stem and downsampling would drop rows and columns. Images are therefore padded with zeros at the
right and bottom to multiples of 32, as in detectors, and the maps are cropped.

Source: Liu et al., "A ConvNet for the 2020s", CVPR 2022, https://arxiv.org/abs/2201.03545, Sec. 3
(Tables 8 and 9 for its design).
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import PATCH_SIZE, HierarchicalBackbone
from backbones.hosts.scaffolds.timm_source import (
    create_patch_conv,
    create_timm_model,
    extend_all,
    read_source,
)
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import ceil_div, crop, missing
from backbones.mixer_calls import mix_nchw
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill


class ConvNeXt(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NCHW between blocks.

    Source: ConvNeXt, https://arxiv.org/abs/2201.03545.
    """

    channels_first = True
    block_layout = "nchw"
    token_slots = ("conv_dw",)

    def __init__(self, model: TimmConvNeXt, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.stem = model.stem
        self.stages = model.stages
        features = cast("list[dict[str, int]]", model.feature_info)
        widths = [info["num_chs"] for info in features]
        self.set_maps(config, widths, partial(LayerNorm2d, eps=1e-6))
        if not config.dense:
            self.norm = model.get_submodule("head.norm")
        for stage, layer in enumerate(self.stages):
            grid = config.grid(self.feature_info[stage].stride)
            for index, block in enumerate(extend_all(layer.get_submodule("blocks"), SlottedBlock)):
                slot = Slot(widths[stage], 4.0, grid, stage, index, dense=config.dense)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "conv_dw", config.token_mixer, slot)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, C, h, w) of images (B, 3, H, W), before any norm."""
        height, width = images.shape[-2:]
        divisor = self.size_divisor
        x = self.stem(F.pad(images, (0, missing(width, divisor), 0, missing(height, divisor))))
        maps = []
        for stage, info in zip(self.stages, self.feature_info, strict=True):
            x = stage(x)
            size = ceil_div(height, info.stride), ceil_div(width, info.stride)
            maps.append(crop(x, *size))
        return maps

    def embed(self, images: Tensor) -> Tensor:
        """Return the normed mean over the last map: (B, 3, H, W) -> (B, num_features)."""
        self.check_embeds()
        pooled = self.stage_maps(images)[-1].mean(dim=(2, 3), keepdim=True)
        return self.norm(pooled).flatten(1)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename timm's tensors and the authors' (``downsample_layers.N``, ``dwconv``) to ours."""
        return rename(state_dict, RENAMES)


class SlottedBlock(ConvNeXtBlock):
    """timm's block with slots for mixers: a token and a channel mixer in one residual branch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x + DropPath(gamma * mlp(norm(conv_dw(x)))): (B, C, H, W) -> (B, C, H, W)."""
        y = self.mlp(self.norm(to_nhwc(mix_nchw(self.conv_dw, x))))
        if self.gamma is not None:
            y = y * self.gamma
        return self.shortcut(x) + self.drop_path(to_nchw(y))


RENAMES = (
    (r"^head\.norm\.", "norm."),
    (r"^head\.(fc\.)?", "classifier."),
    (r"^downsample_layers\.0\.", "stem."),
    (r"^downsample_layers\.(\d)\.", r"stages.\1.downsample."),
    (r"^stages\.(\d)\.(\d+)\.", r"stages.\1.blocks.\2."),
    # Within the block itself, since a mixer may have parts of these names.
    (r"(\.blocks\.\d+)\.dwconv\.", r"\1.conv_dw."),
    (r"(\.blocks\.\d+)\.pwconv([12])\.", r"\1.mlp.fc\2."),
)


@register_host("convnext_t", source="ConvNeXt, Sec. 3")
def convnext_t(config: HostConfig) -> ConvNeXt:
    """Widths 96 to 768, depths 3, 3, 9, 3."""
    network = cast("TimmConvNeXt", create_timm_model("convnext_tiny.fb_in1k", config))
    if config.patch_size != PATCH_SIZE:  # timm's own option would stride the first stage
        init = partial(nn.init.trunc_normal_, std=0.02)
        network.stem[0] = create_patch_conv(
            config.patch_size, cast("nn.Conv2d", network.stem[0]), init
        )
    return ConvNeXt(network, config)
