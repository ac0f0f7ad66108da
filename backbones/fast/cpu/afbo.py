"""AFBO as one operator: W3 (SiLU(DW_a(W_a x + b_a)) * DW_b(W_b x + b_b)) + b3, Eq. 4.

``csrc/gated.cpp`` takes a few hundred tokens through all steps while they are in the cache. The
backward pass keeps x and what is mapped, and computes convolutions, gate and product again: it
needs as much memory as an FFN, where torch's operations keep four more maps.

Time of the network with over without it, on an AMD EPYC with AVX-512: ``deit_t`` 0.60 and 0.62 in
evaluation (batch 1 and 8), 0.69 in training (batch 4); ``swin_t`` 0.66 (batch 1).

Axes: B images, P prefix tokens, H W map, C channels, h hidden channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from backbones.fast.base import FastModule
from backbones.mixers.afbo.channel_mappings import ChannelMapping, OverlappedCycleMapping
from backbones.mixers.afbo.scfbo import SCFBO
from backbones.mixers.afbo.spatial_models import SameConv


class FastSCFBO(FastModule, SCFBO):
    """AFBO with depthwise 3x3 convolutions and SiLU on branch a, and whatever maps the channels."""

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True for the options that the operator computes."""
        return (
            x.shape[-1] == self.cm_a.dim
            and x.shape[1] * x.shape[2] > 0
            and (self.order, self.act, self.act_on) == ("cs", "silu", "a")
            and self.cm_b is not None
            and _is_depthwise(self.sm_a)
            and _is_depthwise(self.sm_b)
            and type(self.proj) is nn.Linear
            and not (self.drop.training and self.drop.p)
        )

    def compute(self, x: Tensor, prefix: Tensor | None = None) -> Any:
        """Mix the map (B, H, W, C) and, when given, the prefix tokens (B, P, C)."""
        size, tokens = (x.shape[1], x.shape[2]), x.flatten(1, 2)
        count = 0 if prefix is None else prefix.shape[1]
        if prefix is not None:
            tokens = torch.cat([prefix, tokens], dim=1)
        y = gated_mixer(tokens, count, size, *operands(self))
        if prefix is None:
            return y.unflatten(1, size)
        return y[:, count:].unflatten(1, size), y[:, :count]


def operands(mixer: SCFBO) -> tuple[Any, ...]:
    """Return the weights of a mixer as ``gated_mixer`` takes them."""
    cm_a, cm_b = mixer.cm_a, cast("ChannelMapping", mixer.cm_b)
    sm_a, sm_b = cast("SameConv", mixer.sm_a), cast("SameConv", mixer.sm_b)
    weights, more = _weights(cm_a), _weights(cm_b)
    flat = [number for block in cm_a.blocks for number in block]
    flat += [n for index, start in cm_b.blocks for n in (index + len(weights), start)]
    biases, kernels = (cm_a.bias, cm_b.bias), (sm_a.weight, sm_b.weight)
    proj = (mixer.proj.weight, mixer.proj.bias)
    return [*weights, *more], flat, *biases, *kernels, sm_a.bias, sm_b.bias, *proj


def gated_mixer(
    tokens: Tensor,
    prefix: int,
    size: tuple[int, int],
    weights: list[Tensor],
    blocks: list[int],
    *terms: Tensor | None,
) -> Tensor:
    """Mix a map and its prefix tokens, which skip the convolutions: (B, P + H W, C) -> the same.

    Args:
        tokens: (B, P + H W, C).
        prefix: P.
        size: (H, W).
        weights: Of both mappings, each (rows, columns).
        blocks: Pairs, first those of a: the number of a weight, and the first column of x that it
            reads. A block that ends beyond the last column continues with the first. Their rows
            are the 2 h channels in order.
        *terms: b_a and b_b (h,), kernels of DW_a and DW_b (h, 1, 3, 3), their biases (h,), W3
            (C, h) and b3 (C,).
    """
    *biases_and_kernels, proj, proj_bias = terms
    assert proj is not None
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (tokens, *weights, *terms)
    )
    y: Tensor = torch.ops.mixerlab.gated_mixer(
        tokens.contiguous(), prefix, *size, weights, blocks, *biases_and_kernels, proj, proj_bias,
        keep,
    )[0]  # fmt: skip
    return y


def _weights(mapping: Any) -> Sequence[Tensor]:
    """Return the weights of ``as_blocks``, each (rows, columns)."""
    if isinstance(mapping, OverlappedCycleMapping):
        return [getattr(mapping.weights, str(index)) for index in range(len(mapping.blocks))]
    weights: Sequence[Tensor] = mapping.weight.view(-1, *mapping.weight.shape[-2:]).unbind()
    return weights


def _is_depthwise(module: nn.Module) -> bool:
    return (
        type(module) is SameConv
        and module.kernel_size == (3, 3)
        and module.groups == module.in_channels
    )
