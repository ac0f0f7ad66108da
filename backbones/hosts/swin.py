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
    WindowAttention,
    checkpoint_filter_fn,
    window_partition,
    window_reverse,
)
from torch import Tensor

from backbones.base import HostConfig, Mixer, Slot, fill
from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone
from backbones.hosts.scaffolds.timm_source import create_timm_model, extend, extend_all
from backbones.layers.graph_sizes import is_any_size, missing
from backbones.layers.shifted_windows import AnyLength, Size, mask_of_regions, shift_mask
from backbones.registry import register_host

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
            own = dict(self.named_parameters())
            foreign = {k: v for k, v in state_dict.items() if k.endswith(TABLE) and k not in own}
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
        _, height, width, channels = x.shape
        if is_any_size(x.shape[1:3]):
            return self._attn_any_size(x)
        (window_h, shift_h), (window_w, shift_w) = self._window(height), self._window(width)
        window, shift = (window_h, window_w), (shift_h, shift_w)
        x = F.pad(x, (0, 0, 0, missing(width, window_w), 0, missing(height, window_h)))
        padded = (x.shape[1], x.shape[2])
        if any(shift):
            x = torch.roll(x, (-shift_h, -shift_w), dims=(1, 2))
        windows = window_partition(x, window).flatten(1, 2)
        mask = shift_mask(padded, window, shift, x.device, x.dtype) if any(shift) else None
        windows = self.attn(windows, window, mask)
        x = window_reverse(windows.reshape(-1, *window, channels), window, *padded)
        if any(shift):
            x = torch.roll(x, shift, dims=(1, 2))
        return x[:, :height, :width]

    def _attn_any_size(self, x: Tensor) -> Tensor:
        """Apply shifted-window attention without a branch on sizes, for graphs of any size."""
        _, height, width, channels = x.shape
        side: int = self.window_size[0]
        window, shift = (side, side), self.target_shift_size[0]
        rows, columns = (
            AnyLength(size, side, shift, self.shift_single_window, x.device)
            for size in (height, width)
        )
        x = columns.roll(rows.roll(x, 1), 2)
        mask = mask_of_regions(rows.regions, columns.regions, window, x.dtype)
        windows = self.attn(window_partition(x, window).flatten(1, 2), window, mask)
        x = windows.reshape(-1, *window, channels)
        x = window_reverse(x, window, rows.padded, columns.padded)
        return columns.unroll(rows.unroll(x, 1), 2)

    def _window(self, size: int) -> Size:
        """Return window and shift along an axis of ``size`` tokens."""
        full: int = self.window_size[0]
        shifts = size > full or (self.shift_single_window and size == full)
        return min(full, size), self.target_shift_size[0] if shifts else 0


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


class AnyWindowAttention(WindowAttention):
    """timm's window attention for windows up to the size of its bias table."""

    # timm's reads one window size for all maps from itself.
    def forward(  # type: ignore[override]
        self, x: Tensor, window: Size, mask: Tensor | None
    ) -> Tensor:
        """Attend within windows.

        Args:
            x: (num_windows * B, h * w, C), image by image.
            window: (h, w).
            mask: (num_windows, h * w, h * w), added to the logits.
        """
        num_tokens = x.shape[1]
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self._bias(window)
        if mask is not None:
            repeats = x.shape[0] // mask.shape[0]
            bias = (bias + mask[:, None]).repeat(repeats, 1, 1, 1)
        drop = self.attn_drop.p if self.training else 0.0
        query, key, value = qkv.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=drop)
        x = x.transpose(1, 2).reshape(-1, num_tokens, self.proj.in_features)
        return self.proj_drop(self.proj(x))

    def _bias(self, window: Size) -> Tensor:
        """Return the relative position bias (1, heads, h * w, h * w).

        A smaller window uses the same table, since offsets keep their meaning.
        """
        bias = self._get_rel_pos_bias()
        if window == self.window_size:
            return bias
        height, width = window
        bias = bias.unflatten(-1, self.window_size).unflatten(-3, self.window_size)
        return bias[:, :, :height, :width, :height, :width].flatten(4, 5).flatten(2, 3)


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
