"""PosMLP T/S/B: a convolutional stem, four stages of windowed gating units, no second MLP.

Source: Wang et al., "Parameterization of Cross-Token Relations with Relative Positional Encoding
for Vision MLP", MM 2022, https://doi.org/10.1145/3503161.3547953, Sec. 4.2, Fig. 2, Table 11; the
authors' released code for norms, activations and initialisation. The paper's detector is
unpublished; for dense prediction windows are shifted in every second block (Sec. 5.5), every map
gets a LayerNorm, and the stem's BatchNorm keeps its statistics.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn

from backbones.hosts.posmlp.checkpoint_conversion import rename_to_ours
from backbones.hosts.posmlp.patch_embeddings import (
    EPS,
    ConvEmbed,
    LinearEmbed,
    Merge,
    Norm,
    downsample,
)
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates, restride
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixer import Mixer
from backbones.mixers.posmlp.posgu import ggqpe
from backbones.options import variant_of
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

DEPTHS = (2, 2, 18, 2)
HIDDEN_RATIOS = (4.0, 4.0, 4.0, 2.0)

Embed = Literal["conv", "linear"]


class PosMLP(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside the stages.

    Args:
        config: See ``HostConfig``.
        width: Channels C of the first stage; they double in each stage.
        embed: "conv" (ConvPE) or "linear" patch embedding, 4x4 pixels each (Table 10).
        merge: Between stages: "conv" (ConvPM, depthwise), "linear" (Swin's), or "full_conv" of the
            released code.
        embed_norm: Norm of ConvPE.
        merge_norm: Norm of ConvPM.
        position: Add a learned table to the first map (APE, Tables 7 and 9).
        drop: Dropout after every block's branch.

    Source: PosMLP, https://doi.org/10.1145/3503161.3547953.
    """

    token_slots = ("mixer",)
    channel_slots = ()

    def __init__(
        self, config: HostConfig, *, width: int, embed: Embed = "conv", merge: Merge = "conv",
        embed_norm: Norm = "bn", merge_norm: Norm = "ln", position: bool = False, drop: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_pretrained("PosMLP", config)
        widths = [width * 2**stage for stage in range(4)]
        self.set_maps(config, widths, partial(nn.LayerNorm, eps=EPS))
        self.norm_eval = config.dense  # as the authors train their detectors
        self.patch_embed: nn.Module
        if embed == "conv":
            self.patch_embed = ConvEmbed(width, embed_norm)
            restride(self.patch_embed, config)
        else:
            self.patch_embed = LinearEmbed(width, config.patch_size)
        grids = [config.grid(info.stride) for info in self.feature_info]
        self.pos_embed = nn.Parameter(torch.empty(1, width, *grids[0])) if position else None
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        rates = drop_path_rates(config.drop_path_rate, sum(DEPTHS))
        self.stages = nn.ModuleList()
        places: list[tuple[PosMLPBlock, Slot]] = []
        for stage, (dim, depth) in enumerate(zip(widths, DEPTHS, strict=True)):
            merging = downsample(dim // 2, merge, merge_norm) if stage else nn.Identity()
            blocks = []
            for index in range(depth):
                ratio = HIDDEN_RATIOS[stage]
                slot = Slot(dim, ratio, grids[stage], stage, index, dense=config.dense)
                blocks.append(PosMLPBlock(slot, rates.pop(0), drop))
                places.append((blocks[-1], slot))
            self.stages.append(PosMLPStage(merging, blocks))
        for block, slot in places:  # last, so that the host's weights are those without mixers
            fill(block, "mixer", config.token_mixer, slot)
        self.train()  # applies norm_eval

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, C) of images (B, 3, H, W), before any norm."""
        x = self.patch_embed(images.contiguous(memory_format=torch.channels_last))
        if self.pos_embed is not None:
            x = x + _resized(self.pos_embed, (x.shape[2], x.shape[3]))
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
            x = to_nchw(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors, and resample a position table of another image size."""
        state_dict = rename_to_ours(state_dict)
        table = state_dict.get("pos_embed")
        if table is not None and self.pos_embed is not None:
            if table.ndim == 3:  # the authors add it reshaped, not transposed
                table = table.reshape(1, self.pos_embed.shape[1], math.isqrt(table.shape[1]), -1)
            state_dict["pos_embed"] = _resized(table, tuple(self.pos_embed.shape[2:]))
        return state_dict


class PosMLPStage(nn.Module):
    """Downsampling, then blocks: (B, C', h, w) -> (B, ceil(h / 2), ceil(w / 2), C)."""

    def __init__(self, downsample: nn.Module, blocks: list[PosMLPBlock]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks to the downsampled map: (B, C', h, w) -> (B, H, W, C)."""
        return self.blocks(to_nhwc(self.downsample(x)).contiguous())


class PosMLPBlock(nn.Module):
    """x + DropPath(Dropout(mixer(LN(x)))) with GGQPE as mixer unless it is replaced.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: PosMLP, Fig. 2d.
    """

    def __init__(self, slot: Slot, drop_path: float, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(slot.dim, eps=EPS)
        self.mixer: Mixer = ggqpe(slot.dim, hidden_ratio=slot.hidden_ratio, slot=slot)
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the mixed normed map: (B, H, W, C) -> (B, H, W, C)."""
        return x + self.drop_path(self.drop(self.mixer(self.norm(x))))


def _resized(table: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resample a position map: (1, C, h, w) -> (1, C, *size)."""
    if tuple(table.shape[2:]) == tuple(size):
        return table
    return F.interpolate(table, size, mode="bicubic", antialias=True)


@register_host("posmlp_t", slots=["token"], source="PosMLP (MM 2022), Table 11")
@variant_of(PosMLP, fixed={"width": 96})
def posmlp_t() -> None:
    """Widths 96 to 768, depths 2, 2, 18, 2."""


@register_host("posmlp_s", slots=["token"], source="PosMLP (MM 2022), Table 11")
@variant_of(PosMLP, fixed={"width": 128})
def posmlp_s() -> None:
    """Widths 128 to 1024, depths 2, 2, 18, 2."""


@register_host("posmlp_b", slots=["token"], source="PosMLP (MM 2022), Table 11")
@variant_of(PosMLP, fixed={"width": 192})
def posmlp_b() -> None:
    """Widths 192 to 1536, depths 2, 2, 18, 2."""
