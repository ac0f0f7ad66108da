"""The operation as one compiled operator, where that serves; see ``backbones/kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from backbones import kernels
from backbones.kernels.gated_mixer import gated_mixer
from backbones.layers.axes import join_tokens
from backbones.layers.fused_forms import is_plain
from backbones.mixers.afbo.channel_mappings import ChannelMapping, OverlappedCycleMapping
from backbones.mixers.afbo.spatial_models import SameConv

if TYPE_CHECKING:
    from backbones.mixers.afbo.block_products import MatrixBlock
    from backbones.mixers.afbo.scfbo import SCFBO


def serves(mixer: SCFBO, x: Tensor) -> bool:
    """Whether the operator computes just what this mixer is, and nobody looks inside."""
    return (
        kernels.serves(x)
        and x.shape[-1] == mixer.cm_a.dim
        and x.shape[1] * x.shape[2] > 0
        and (mixer.order, mixer.act, mixer.act_on) == ("cs", "silu", "a")
        and mixer.cm_b is not None
        and _is_depthwise(mixer.sm_a)
        and _is_depthwise(mixer.sm_b)
        and type(mixer.proj) is nn.Linear
        and not (mixer.drop.training and mixer.drop.p)
        and is_plain(mixer, kernels.weight_dtype(x))
    )


def mix(mixer: SCFBO, x: Tensor, prefix: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Eq. 4 of the map (B, H, W, C) and, when given, of the prefix tokens (B, P, C)."""
    size, count = (x.shape[1], x.shape[2]), 0 if prefix is None else prefix.shape[1]
    tokens = x.flatten(1, 2) if prefix is None else join_tokens(prefix, x)
    maps = (mixer.cm_a, cast("ChannelMapping", mixer.cm_b))
    convs = (cast("SameConv", mixer.sm_a), cast("SameConv", mixer.sm_b))
    (weights, blocks), (more, others) = map(_blocks, maps)
    flat = [number for block in blocks for number in block]
    flat += [n for index, start in others for n in (index + len(weights), start)]
    y = gated_mixer(
        tokens,
        count,
        size,
        [*weights, *more],
        flat,
        (maps[0].bias, maps[1].bias),
        (convs[0].weight, convs[1].weight),
        (convs[0].bias, convs[1].bias),
        mixer.proj.weight,
        mixer.proj.bias,
    )
    if prefix is None:
        return y.unflatten(1, size)
    return y[:, count:].unflatten(1, size), y[:, :count]


def _blocks(mapping: ChannelMapping) -> tuple[Sequence[Tensor], Sequence[MatrixBlock]]:
    """``as_blocks``, without asking a list for its parameters one by one: 20 microseconds."""
    if type(mapping) is not OverlappedCycleMapping:
        return mapping.as_blocks()
    weights = [getattr(mapping.weights, str(index)) for index in range(len(mapping.blocks))]
    return weights, mapping.blocks


def _is_depthwise(module: nn.Module) -> bool:
    return (
        type(module) is SameConv
        and module.kernel_size == (3, 3)
        and module.groups == module.in_channels
    )
