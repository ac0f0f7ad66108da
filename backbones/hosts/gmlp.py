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

import torch.nn.functional as F
from timm.models.mlp_mixer import MlpMixer, SpatialGatingUnit
from torch import Tensor

from backbones.base import Backbone, FeatureInfo, HostConfig, Slot, fill
from backbones.hosts.deit import PATCH
from backbones.layers.feature_pyramid import (
    PYRAMID_CHANNELS,
    PYRAMID_STRIDES,
    SimpleFeaturePyramid,
)
from backbones.layers.token_relations import hide
from backbones.layers.windows import Pattern, corner_of_matrix, mix_windows
from backbones.layouts import to_nchw
from backbones.registry import register_host
from backbones.timm_source import create_timm_model

WINDOW = 14
HIDDEN_RATIO = 6.0


class GMLP(Backbone):
    """Thirty equal blocks at stride 16; the last map, or a pyramid made from it."""

    size_divisor = PYRAMID_STRIDES[-1]
    classification_keys = ("norm.",)
    map_keys = tuple(f"pyramid.scales.{level}." for level in range(len(PYRAMID_STRIDES)))

    def __init__(self, model: MlpMixer, config: HostConfig) -> None:
        super().__init__()
        self.stem = model.stem
        self.blocks = model.blocks
        self.num_features = model.num_features
        self.dense = config.dense
        if config.dense:
            self.pyramid = SimpleFeaturePyramid(self.num_features)
            self.feature_info = tuple(FeatureInfo(PYRAMID_CHANNELS, s) for s in PYRAMID_STRIDES)
        else:
            self.norm = model.norm
            self.feature_info = (FeatureInfo(self.num_features, PATCH),)
        grid = config.grid(PATCH)
        for index, block in enumerate(self.blocks):
            gate = cast("WindowedSpatialGatingUnit", block.get_submodule("mlp_channels.gate"))
            gate.__class__ = WindowedSpatialGatingUnit
            gate.shifted = config.dense and index % 2 == 1
            slot = Slot(self.num_features, HIDDEN_RATIO, grid, 0, index, dense=config.dense)
            fill(block, "mlp_channels", config.token_mixer, slot)

    def _map(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, h, w, C) after the last block."""
        height, width = images.shape[-2:]
        tokens = self.stem(F.pad(images, (0, -width % PATCH, 0, -height % PATCH)))
        return cast("Tensor", self.blocks(tokens.unflatten(1, (-(-height // PATCH), -1))))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> the normed stride-16 map, or four maps of 256 channels if dense."""
        x = self._map(images)
        if not self.dense:
            return (to_nchw(self.norm(x)).contiguous(),)
        return self.pyramid.crop(to_nchw(x).contiguous(), (images.shape[-2], images.shape[-1]))

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_features): LayerNorm, then the mean over all tokens."""
        self.check_embeds()
        return cast("Tensor", self.norm(self._map(images)).mean(dim=(1, 2)))

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Accept timm's names."""
        return {
            "classifier." + key.removeprefix("head.") if key.startswith("head.") else key: value
            for key, value in state_dict.items()
        }


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
    # Built at 224 whatever img_size is, so that every size shares one matrix of 14x14 tokens.
    model = cast("MlpMixer", create_timm_model(variant, config, stem_norm=stem_norm))
    model.stem.strict_img_size = False
    return GMLP(model, config)


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
