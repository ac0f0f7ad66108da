"""Swin Transformer T/S/B on timm's network, at any image size.

timm pads a map after rolling it; the authors' code, torchvision and MMDetection pad before. The
outputs differ on maps that the window does not divide, hence at all detection and segmentation
sizes (by 7 to 12 % of the signal for Swin-T at 256x320), so the block's attention is rewritten.

Source: Liu et al., "Swin Transformer", ICCV 2021, https://arxiv.org/abs/2103.14030, Table 7
(networks), Sec. 3.2 (shifted windows).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    checkpoint_filter_fn,
)
from torch import Tensor

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone
from backbones.hosts.scaffolds.timm_source import create_timm_model, extend, extend_all, read_source
from backbones.mixer import Mixer
from backbones.mixers.attentions.window_attention import AnyWindowAttention
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

TABLE = "relative_position_bias_table"


class Swin(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside.

    Classification follows the authors' classifier, which shifts an axis only if the map is longer
    than the window. Dense prediction follows their detector: it always shifts, and every output has
    its own LayerNorm. In both, a map smaller than the window is one window of its own size; in the
    authors' detector padding would attend.

    Source: Swin Transformer, https://arxiv.org/abs/2103.14030.
    """

    merges_end_stages = True  # in the authors' names; timm's stages begin with the merging

    def __init__(self, model: SwinTransformer, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.patch_embed = model.patch_embed
        self.layers = model.layers
        self.set_maps(config, [info["num_chs"] for info in model.feature_info])
        if not config.dense:
            self.norm = model.norm
        self._fill_slots(config)
        self.no_weight_decay = frozenset(
            name for name, _ in self.named_parameters() if name.endswith(TABLE)
        )

    def _fill_slots(self, config: HostConfig) -> None:
        for stage, layer in enumerate(self.layers):
            grid = config.grid(self.feature_info[stage].stride)
            if isinstance(layer.downsample, PatchMerging):
                extend(layer, "downsample", AnyPatchMerging)
            for index, block in enumerate(extend_all(layer.get_submodule("blocks"), SwinBlock)):
                block.shift_single_window = config.dense
                slot = Slot(block.dim, block.mlp_ratio, grid, stage, index, dense=config.dense)
                extend(block, "attn", AnyWindowAttention)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "attn", config.token_mixer, slot)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, C) of images (B, 3, H, W), before any norm."""
        x = self.patch_embed(images)
        maps = []
        for layer in self.layers:
            x = layer(x)
            maps.append(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors (downsampling ends a stage) and timm's to ours."""
        official = "layers.0.downsample.reduction.weight" in state_dict
        if official or "patch_embed.proj.weight" in state_dict:
            # timm's filter reads the attention of every bias table; a mixer may have replaced it.
            parameters = dict(self.named_parameters())
            foreign = {
                k: v for k, v in state_dict.items() if k.endswith(TABLE) and k not in parameters
            }
            state_dict = {k: v for k, v in state_dict.items() if k not in foreign}
            state_dict = checkpoint_filter_fn(state_dict, self) | foreign
        return rename(state_dict, [(r"^head\.(fc\.)?", "classifier.")])


class SwinBlock(SwinTransformerBlock):
    """timm's block with the authors' order of padding and rolling, in NHWC."""

    shift_single_window: bool

    def forward(self, x: Tensor) -> Tensor:
        """Apply window attention and FFN, each with its shortcut: (B, H, W, C) -> the same."""
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _attn(self, x: Tensor) -> Tensor:
        if isinstance(self.attn, Mixer):
            return self.attn(x)
        attn = cast("AnyWindowAttention", self.attn)
        return attn.attend(x, self.target_shift_size[0], self.shift_single_window)


class AnyPatchMerging(PatchMerging):
    """timm's merging of 2x2 neighbours, by operations that graphs for any size can record."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm and project four neighbours: (B, H, W, C) -> (B, ceil(H/2), ceil(W/2), 2 C)."""
        # Every second row is read, so that padding by one row equals padding by H % 2.
        rows = (x, F.pad(x, (0, 0, 0, 0, 0, 1)))
        parts = []
        for column in (0, 1):
            for row in (0, 1):
                part = rows[row][:, row::2]
                part = F.pad(part, (0, 0, 0, 1)) if column else part
                parts.append(part[:, :, column::2])
        return self.reduction(self.norm(torch.cat(parts, dim=-1)))


def _build(variant: str, config: HostConfig) -> Swin:
    # Always built for a first map of 56x56, so that all sizes share one table of 7x7 windows.
    network = create_timm_model(
        variant,
        config,
        img_size=56 * config.patch_size,
        patch_size=config.patch_size,
        strict_img_size=False,
        always_partition=True,
    )
    model = cast("SwinTransformer", network)
    patch_embed: Any = model.patch_embed
    patch_embed.dynamic_img_pad = True
    return Swin(model, config)


@register_host("swin_t", source="Swin Transformer, Table 1")
def swin_t(config: HostConfig) -> Swin:
    """Widths 96 to 768, depths 2, 2, 6, 2."""
    return _build("swin_tiny_patch4_window7_224", config)


@register_host("swin_s", source="Swin Transformer, Table 1")
def swin_s(config: HostConfig) -> Swin:
    """Widths 96 to 768, depths 2, 2, 18, 2."""
    return _build("swin_small_patch4_window7_224", config)


@register_host("swin_b", source="Swin Transformer, Table 1")
def swin_b(config: HostConfig) -> Swin:
    """Widths 128 to 1024, depths 2, 2, 18, 2."""
    return _build("swin_base_patch4_window7_224", config)
