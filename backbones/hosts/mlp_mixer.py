"""MLP-Mixer S/16 and B/16 on timm's network, at any image size, with DeiT's pyramid if dense.

Its MLP over tokens belongs to a grid of 14x14 patches (224 pixels). As in gMLP, larger maps are cut
into windows of that size, and smaller ones use a corner of the weights. In dense prediction every
second block shifts the windows by half their size. Padding is never read.

timm's weights (B/16 only) expect images normalised with mean 0.5 and deviation 0.5.

Source: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision", NeurIPS 2021,
https://arxiv.org/abs/2105.01601, Table 1. Stochastic depth rises linearly over the blocks, where
timm has one rate for all.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, lecun_normal_
from timm.models.mlp_mixer import MixerBlock, MlpMixer
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.isotropic import PATCH_SIZE, IsotropicBackbone
from backbones.hosts.scaffolds.timm_source import (
    create_patch_conv,
    create_timm_model,
    extend,
    read_source,
)
from backbones.layers.graph_sizes import ceil_div, missing
from backbones.layers.windows import Pattern, map_windows, spans
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

WINDOW = 14
HIDDEN_RATIO = 4.0


class PatchMLP(IsotropicBackbone):
    """Patch embedding and equal blocks on (B, h, w, C); base class of MLP-Mixer and gMLP."""

    def __init__(self, model: MlpMixer, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.stem = model.stem
        self.blocks = model.blocks
        self.set_map(config, model.num_features, model.norm)
        rates = drop_path_rates(config.drop_path_rate, len(self.blocks))
        for block, rate in zip(self.blocks, rates, strict=True):
            block.drop_path = DropPath(rate) if rate else nn.Identity()

    def last_map(self, images: Tensor) -> Tensor:
        """Return the last block's output: (B, 3, H, W) -> (B, h, w, C)."""
        (height, width), patch = images.shape[-2:], self.patch_size
        tokens = self.stem(F.pad(images, (0, missing(width, patch), 0, missing(height, patch))))
        return self.blocks(tokens.unflatten(1, (ceil_div(height, patch), -1)))

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename timm's classifier."""
        return rename(state_dict, [(r"^head\.", "classifier.")])


class MixerMLP(PatchMLP):
    """MLP-Mixer: blocks of an MLP over tokens and one over channels.

    Source: MLP-Mixer, https://arxiv.org/abs/2105.01601.
    """

    token_slots = ("mlp_tokens",)
    channel_slots = ("mlp_channels",)

    def __init__(self, model: MlpMixer, config: HostConfig) -> None:
        super().__init__(model, config)
        grid = config.grid(config.patch_size)
        for index, block in enumerate(self.blocks):
            tokens = extend(block, "mlp_tokens", WindowedTokenMLP)
            tokens.shifted = config.dense and index % 2 == 1
            slot = Slot(self.num_features, HIDDEN_RATIO, grid, 0, index, dense=config.dense)
            fill(block, "mlp_channels", config.channel_mixer, slot)
            fill(block, "mlp_tokens", config.token_mixer, slot)


class MapMixerBlock(MixerBlock):
    """timm's block on maps."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply token and channel MLP, each with its shortcut: (B, H, W, C) -> the same."""
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x)))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


class WindowedTokenMLP(Mlp):
    """timm's MLP over 14x14 tokens on maps of any size.

    Distant tokens that a shift brings into one window are mixed apart, each group with the weights
    of its places.
    """

    shifted: bool

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the tokens of every window: (B, H, W, C) -> (B, H, W, C)."""
        return map_windows(x, WINDOW, self.shifted, self._mix)

    def _mix(self, windows: Tensor, rows: Pattern, columns: Pattern) -> Tensor:
        """Return W2 GELU(W1 x) over tokens of equal windows: (B, n, e, m, f, C) -> the same."""
        groups = [(down, across) for down in spans(rows) for across in spans(columns)]
        extent = (slice(0, rows.size), slice(0, columns.size))
        if groups == [extent]:
            return self._mix_group(windows, *extent)
        mixed = torch.zeros_like(windows)
        for down, across in groups:
            part = windows[:, :, down, :, across]
            mixed[:, :, down, :, across] = self._mix_group(part, down, across)
        return mixed

    def _mix_group(self, x: Tensor, down: slice, across: slice) -> Tensor:
        """Mix (B, n, e', m, f', C) with the weights of the given places."""
        square, size = (WINDOW, WINDOW), (x.shape[2], x.shape[4])
        read = self.fc1.weight.unflatten(1, square)[:, down, across].flatten(1)
        write = self.fc2.weight.unflatten(0, square)[down, across].flatten(0, 1)
        bias = cast("Tensor", self.fc2.bias).unflatten(0, square)[down, across].flatten()
        tokens = x.permute(0, 1, 3, 5, 2, 4).flatten(4)  # (B, n, m, C, e' f')
        hidden = self.drop1(self.act(F.linear(tokens, read, self.fc1.bias)))
        mixed = self.drop2(F.linear(hidden, write, bias))
        return mixed.unflatten(4, size).permute(0, 1, 4, 2, 5, 3)


def create_patch_mlp(variant: str, config: HostConfig, **options: Any) -> MlpMixer:
    """Build timm's network for 14x14 patches at any ``img_size``, so that all share weights."""
    model = cast("MlpMixer", create_timm_model(variant, config, **options))
    model.stem.strict_img_size = False
    if config.patch_size != PATCH_SIZE:  # timm's functions fix it
        model.stem.proj = create_patch_conv(config.patch_size, model.stem.proj, lecun_normal_)
        model.stem.patch_size = (config.patch_size, config.patch_size)
    return model


@register_host("mixer_s16", source="MLP-Mixer (NeurIPS 2021), Table 1", patch_size=PATCH_SIZE)
def mixer_s16(config: HostConfig) -> MixerMLP:
    """Width 512, 8 blocks."""
    return MixerMLP(create_patch_mlp("mixer_s16_224", config, block_layer=MapMixerBlock), config)


@register_host("mixer_b16", source="MLP-Mixer (NeurIPS 2021), Table 1", patch_size=PATCH_SIZE)
def mixer_b16(config: HostConfig) -> MixerMLP:
    """Width 768, 12 blocks."""
    return MixerMLP(create_patch_mlp("mixer_b16_224", config, block_layer=MapMixerBlock), config)
