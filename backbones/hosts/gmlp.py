"""gMLP Ti/S/B on timm's network, at any image size, with DeiT's pyramid for dense prediction.

Its token matrix belongs to a grid of 14x14 patches (224 pixels). Larger maps are cut into windows
of that size, as in PosMLP's unit, and smaller ones use a corner of the matrix.

Source: Liu et al., "Pay Attention to MLPs", NeurIPS 2021, https://arxiv.org/abs/2105.08050, Table
1; PosMLP (MM 2022), Tables 1 and 3 (other units as gates). timm gates the first half of the
channels and mixes the second, PosMLP vice versa; weights of PosMLP's released gMLP are reordered on
loading. gMLP's paper omits the epsilon of the unit's LayerNorm: timm has 1e-5 there and 1e-6 in its
other norms, PosMLP's code has 1e-6 (``gate_eps``).
"""

from __future__ import annotations

import re
from functools import partial
from typing import cast

import torch
from timm.models.mlp_mixer import MlpMixer, SpatialGatingUnit
from torch import Tensor, nn

from backbones.hosts.mlp_mixer import WINDOW, PatchMLP, create_patch_mlp
from backbones.hosts.posmlp.checkpoint_conversion import rename_to_ours
from backbones.hosts.scaffolds.isotropic import PATCH_SIZE
from backbones.hosts.scaffolds.timm_source import extend
from backbones.layers.windows import Pattern, corner_of_matrix, mix_windows
from backbones.mixer import Mixer
from backbones.mixers.posmlp.relations import hide
from backbones.options import variant_of
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

HIDDEN_RATIO = 6.0
GATE_EPS = 1e-5  # timm's


class GMLP(PatchMLP):
    """Thirty equal blocks at stride 16; returns the last map, or a pyramid made from it.

    Source: gMLP, https://arxiv.org/abs/2105.08050.
    """

    token_slots = ("mlp_channels",)
    channel_slots = ()

    def __init__(self, model: MlpMixer, config: HostConfig, gate_eps: float = GATE_EPS) -> None:
        super().__init__(model, config)
        grid = config.grid(config.patch_size)
        for index, block in enumerate(self.blocks):
            gate = extend(block, "mlp_channels.gate", WindowedSpatialGatingUnit)
            gate.shifted = config.dense and index % 2 == 1
            cast("nn.LayerNorm", gate.norm).eps = gate_eps
            slot = Slot(self.num_features, HIDDEN_RATIO, grid, 0, index, dense=config.dense)
            fill(block, "mlp_channels", config.token_mixer, slot)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename timm's classifier, and the gates of the gMLP that PosMLP's authors released.

        The units of its last four blocks lack a bias and get zeros. Their first half of the
        channels is timm's second.

        Raises:
            ValueError: The file has a norm after the patch embedding, which this network lacks.
        """
        if "stem.norm.weight" in state_dict and "stem.norm.weight" not in self.state_dict():
            raise ValueError(
                "these weights contain a norm after the patch embedding, as in PosMLP's gMLP; "
                "build with stem_norm=True"
            )
        matrices = [match for key in state_dict if (match := AUTHORS_MATRIX.fullmatch(key))]
        for match in matrices:
            bias = f"{match[1]}gate.proj_list.0.bias"
            if bias not in state_dict:
                state_dict[bias] = state_dict[match[0]].new_zeros(len(state_dict[match[0]]))
        state_dict = super().convert_state_dict(rename_to_ours(state_dict))
        for match in matrices:
            if not isinstance(self.get_submodule(match[1].removesuffix(".")), Mixer):
                _to_timm(state_dict, match[1])
        return state_dict


AUTHORS_MATRIX = re.compile(r"(blocks\.\d+\.mlp_channels\.)gate\.proj_list\.0\.weight")


def _to_timm(state_dict: dict[str, Tensor], block: str) -> None:
    """Rename the tensors of our ``sgu`` to timm's, and exchange the halves of its channels."""
    for name in ("weight", "bias"):
        state_dict[f"{block}gate.proj.{name}"] = state_dict.pop(f"{block}gate.relation.{name}")
        mixed, gating = state_dict[f"{block}fc1.{name}"].chunk(2)
        state_dict[f"{block}fc1.{name}"] = torch.cat([gating, mixed])


class WindowedSpatialGatingUnit(SpatialGatingUnit):
    """timm's unit on maps of any size: (B, H, W, h) -> (B, H, W, h / 2)."""

    shifted: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return u * (M norm(v) + b) in every window: (B, H, W, h) -> (B, H, W, h / 2)."""
        u, v = x.chunk(2, dim=-1)
        matrix = partial(_matrix, self.proj.weight)
        return u * mix_windows(self.norm(v), WINDOW, self.shifted, 1, matrix, self.proj.bias)

    def token_matrix(self) -> tuple[Tensor, tuple[int, int]]:
        """Return the matrix (1, N, N) of a whole window, and the window's size (h, w)."""
        return self.proj.weight[None], (WINDOW, WINDOW)


def _matrix(weight: Tensor, rows: Pattern, columns: Pattern) -> Tensor:
    return hide(corner_of_matrix(weight, WINDOW, rows, columns), rows, columns)[None]


def build(
    config: HostConfig,
    *,
    variant: str,
    stem_norm: bool | None = None,
    gate_eps: float = GATE_EPS,
) -> GMLP:
    """Build a gMLP from timm's network ``variant``.

    Args:
        config: Options of every host.
        variant: timm's name.
        stem_norm: LayerNorm after the patch embedding; None: True if the unit is replaced, as in
            PosMLP's released gMLP.
        gate_eps: Epsilon of the LayerNorm within gMLP's own unit: timm's 1e-5, or 1e-6 for weights
            of PosMLP's released gMLP.
    """
    if stem_norm is None:
        stem_norm = config.token_mixer is not None
    if config.token_mixer is not None and gate_eps != GATE_EPS:
        raise ValueError(
            f"gate_eps={gate_eps} belongs to gMLP's own unit, which the token mixer replaces (by "
            "one with 1e-6); leave out gate_eps or token_mixer"
        )
    return GMLP(create_patch_mlp(variant, config, stem_norm=stem_norm), config, gate_eps)


@register_host(
    "gmlp_ti", slots=["token"], source="gMLP (NeurIPS 2021), Table 1", patch_size=PATCH_SIZE
)
@variant_of(build, fixed={"variant": "gmlp_ti16_224"})
def gmlp_ti() -> None:
    """Width 128, 30 blocks."""


@register_host(
    "gmlp_s", slots=["token"], source="gMLP (NeurIPS 2021), Table 1", patch_size=PATCH_SIZE
)
@variant_of(build, fixed={"variant": "gmlp_s16_224"})
def gmlp_s() -> None:
    """Width 256, 30 blocks."""


@register_host(
    "gmlp_b", slots=["token"], source="gMLP (NeurIPS 2021), Table 1", patch_size=PATCH_SIZE
)
@variant_of(build, fixed={"variant": "gmlp_b16_224"})
def gmlp_b() -> None:
    """Width 512, 30 blocks."""
