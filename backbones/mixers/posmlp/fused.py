"""The branch in the form that is the fastest for a map: whose products, and in which order.

Its layers take the products of ``backbones/kernels`` where those are faster than torch's, and
large maps the order of ``contiguous_groups``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from backbones import kernels
from backbones.layers.eager import is_eager
from backbones.layers.fused_forms import is_plain
from backbones.layers.linear import linear, linear_act
from backbones.mixers.posmlp import contiguous_groups

if TYPE_CHECKING:
    from backbones.mixers.posmlp.gated_mlp import GatedMLP


def serves(mixer: GatedMLP, x: Tensor) -> bool:
    """Whether one of both does, and nobody looks inside."""
    return (
        type(mixer.fc1) is nn.Linear
        and type(mixer.fc2) is nn.Linear
        and is_eager(x)
        and (kernels.multiplies(x) or contiguous_groups.suits(mixer, x))
        and is_plain(mixer, x.dtype)
    )


def mix(mixer: GatedMLP, x: Tensor, prefix: Tensor | None = None) -> Tensor:
    """W2 unit(GELU(W1 x + b1)) + b2: (B, H, W, C) -> (B, H, W, C)."""
    if contiguous_groups.suits(mixer, x):
        return contiguous_groups.mix(mixer, x)
    h = linear_act(x, mixer.fc1.weight, mixer.fc1.bias, "gelu")
    return mixer.drop(linear(mixer.gate(h), mixer.fc2.weight, mixer.fc2.bias))
