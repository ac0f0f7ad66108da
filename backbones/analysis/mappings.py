"""The channel mappings of mixers as matrices, and which channels they let interact.

A mixer says by ``channel_mappings`` which parts map its C channels to h hidden ones. Where there
are two, their outputs a = A x and b = B x are multiplied, so that output k holds the products
x_i x_j with weights sum_h W3_kh A_hi B_hj; their strength over all outputs, without regard to
signs, is I_ij = sum_h |W3_:h| |A_hi| |B_hj|.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Fig. 2 and Eq. 4 to
7; the strength is ours.

Axes: C channels, h hidden channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbones.analysis.capturing import value_layer
from backbones.base import Backbone
from backbones.layers.grouped_linear import GroupedLinear
from backbones.mixers.afbo.channel_mappings import ChannelMapping
from backbones.mixers.convglu import ConvGLU


@dataclass(frozen=True)
class Mappings:
    """The mappings of one mixer.

    Attributes:
        matrices: (h, C) by name, zeros where an output does not read an input.
        interactions: (C, C) strengths of products, row the channel read by the first mapping; None
            where nothing is multiplied.
    """

    matrices: dict[str, Tensor]
    interactions: Tensor | None

    def density(self) -> dict[str, float]:
        """The share of entries of each matrix that are not zero."""
        return {name: float((m != 0).double().mean()) for name, m in self.matrices.items()}


@torch.no_grad()
def mixer_mappings(mixer: nn.Module) -> Mappings:
    """The mappings of a mixer, swapped in or the host's own.

    Raises:
        ValueError: It has none as one matrix, such as a KAN.
    """
    owner, names = _owner(mixer)
    if owner is None:
        raise ValueError(
            f"{type(mixer).__name__} maps channels by no one matrix; feed-forward networks, GLU "
            "and the mixers of AFBO do"
        )
    matrices = {
        name: dense(part) for name in names if (part := getattr(owner, name, None)) is not None
    }
    if isinstance(owner, ConvGLU):
        gate, value = matrices.pop("fc1").chunk(2)
        matrices = {"gate": gate, "value": value}
    both = list(matrices.values())
    if len(names) == 2 and len(both) == 1:  # one mapping that both branches read
        both *= 2
    layer = value_layer(owner)
    if len(both) < 2 or layer is None:
        return Mappings(matrices, None)
    out = dense(owner.get_submodule(layer)).norm(dim=0)  # (h,)
    return Mappings(matrices, (both[0].abs() * out[:, None]).T @ both[1].abs())


def channel_mappings(backbone: Backbone) -> dict[str, Mappings]:
    """The mappings of all channel mixers that have them, by name.

    Raises:
        ValueError: None has.
    """
    found = {
        name: mixer_mappings(mixer)
        for name, mixer in backbone.channel_mixers().items()
        if _owner(mixer)[0] is not None
    }
    if not found:
        raise ValueError(
            f"{backbone.name or type(backbone).__name__} has no channel mixer that maps channels "
            "by matrices; feed-forward networks, GLU and the mixers of AFBO do"
        )
    return found


def dense(layer: nn.Module) -> Tensor:
    """A layer of channels as one matrix (out, in).

    Raises:
        ValueError: It is none, such as a 3x3 convolution.
    """
    if isinstance(layer, ChannelMapping):
        return layer.dense_weight().detach()
    if isinstance(layer, GroupedLinear):
        return torch.block_diag(*layer.weight.detach())
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor) and getattr(layer, "groups", 1) == 1:
        if weight.ndim == 2 or weight[0, 0].numel() == 1:
            return weight.detach().flatten(1)
    raise ValueError(f"{type(layer).__name__} is no matrix over channels")


def _owner(mixer: nn.Module) -> tuple[nn.Module | None, tuple[str, ...]]:
    """The part of a mixer that has the mappings, and their names; timm's are called fc1."""
    for module in mixer.modules():
        names = getattr(module, "channel_mappings", ())
        if names:
            return module, names
        for first, second in (("fc1", "fc2"), ("key", "value")):
            if _is_matrix(getattr(module, first, None)) and hasattr(module, second):
                return module, (first,)
    return None, ()


def _is_matrix(layer: object) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.weight[0, 0].numel() == 1
    return isinstance(layer, nn.Linear)
