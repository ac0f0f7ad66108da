"""gMLP Ti/S/B on timm's network, at any image size, with DeiT's pyramid for dense prediction.

Its token matrix belongs to a grid of 14x14 patches (224 pixels). Larger maps are cut into windows
of that size, as PosMLP does with the same unit, and smaller ones use a corner of the matrix.

Source: Liu et al., "Pay Attention to MLPs", NeurIPS 2021, Table 1; PosMLP (MM 2022), Tables 1 and 3
(other units in the gate's place). timm gates the first half of the channels and mixes the second,
PosMLP the other way round; the two are the same network up to the order of channels.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from timm.models.mlp_mixer import MlpMixer, SpatialGatingUnit
from torch import Tensor

from backbones.base import HostConfig, Slot, fill
from backbones.hosts.mlp_mixer import WINDOW, PatchMLP, create_patch_mlp
from backbones.layers.token_relations import hide
from backbones.layers.windows import Pattern, corner_of_matrix, mix_windows
from backbones.plain import PATCH
from backbones.registry import register_host

HIDDEN_RATIO = 6.0


class GMLP(PatchMLP):
    """Thirty equal blocks at stride 16; the last map, or a pyramid made from it."""

    def __init__(self, model: MlpMixer, config: HostConfig) -> None:
        super().__init__(model, config)
        grid = config.grid(PATCH)
        for index, block in enumerate(self.blocks):
            gate = cast("WindowedSpatialGatingUnit", block.get_submodule("mlp_channels.gate"))
            gate.__class__ = WindowedSpatialGatingUnit
            gate.shifted = config.dense and index % 2 == 1
            slot = Slot(self.num_features, HIDDEN_RATIO, grid, 0, index, dense=config.dense)
            fill(block, "mlp_channels", config.token_mixer, slot)


class WindowedSpatialGatingUnit(SpatialGatingUnit):
    """timm's unit on maps of any size: (B, H, W, h) -> (B, H, W, h / 2)."""

    shifted: bool

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, h) -> (B, H, W, h / 2)."""
        u, v = x.chunk(2, dim=-1)
        matrix = partial(_matrix, self.proj.weight)
        return u * mix_windows(self.norm(v), WINDOW, self.shifted, 1, matrix, self.proj.bias)


def _matrix(weight: Tensor, rows: Pattern, columns: Pattern) -> Tensor:
    return hide(corner_of_matrix(weight, WINDOW, rows, columns), rows, columns)[None]


def _build(variant: str, config: HostConfig, stem_norm: bool | None) -> GMLP:
    if stem_norm is None:
        stem_norm = config.token_mixer is not None
    return GMLP(create_patch_mlp(variant, config, stem_norm=stem_norm), config)


@register_host("gmlp_ti", slots=["token"], source="gMLP (NeurIPS 2021), Table 1")
def gmlp_ti(config: HostConfig, *, stem_norm: bool | None = None) -> GMLP:
    """Width 128, 30 blocks. ``stem_norm`` as for ``gmlp_s``."""
    return _build("gmlp_ti16_224", config, stem_norm)


@register_host("gmlp_s", slots=["token"], source="gMLP (NeurIPS 2021), Table 1")
def gmlp_s(config: HostConfig, *, stem_norm: bool | None = None) -> GMLP:
    """Width 256, 30 blocks.

    Args:
        config: Of the host.
        stem_norm: LayerNorm after the patch embedding; None: with another unit than gMLP's own, as
            in PosMLP's released gMLP.
    """
    return _build("gmlp_s16_224", config, stem_norm)


@register_host("gmlp_b", slots=["token"], source="gMLP (NeurIPS 2021), Table 1")
def gmlp_b(config: HostConfig, *, stem_norm: bool | None = None) -> GMLP:
    """Width 512, 30 blocks. ``stem_norm`` as for ``gmlp_s``."""
    return _build("gmlp_b16_224", config, stem_norm)
