"""Channel mappings of mixers as matrices, and the interactions between channels.

A mixer names in ``channel_mappings`` the parts that map its C channels to h hidden ones. The
outputs a = A x and b = B x of two mappings are multiplied, so that output k contains the products
x_i x_j with weights sum_h W3_kh A_hi B_hj. Their strength over all outputs, ignoring signs, is
I_ij = sum_h |W3_:h| |A_hi| |B_hj|.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Fig. 2 and Eq. 4 to
7. We define the strength.

Axes: C channels, h hidden channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbones.analysis.capturing import value_layer
from backbones.base import Backbone
from backbones.layers.grouped_linear import GroupedLinear
from backbones.mixer import class_name
from backbones.mixers.afbo.channel_mappings import ChannelMapping
from backbones.mixers.convglu import ConvGLU
from backbones.mixers.feed_forward.low_rank import LowRankLinear
from backbones.mixers.feed_forward.monarch import MonarchLinear


@dataclass(frozen=True)
class Mappings:
    """Mappings of one mixer.

    Attributes:
        matrices: (h, C) by name; an entry is zero if its output ignores its input.
        interactions: (C, C) strengths of products; rows are inputs of the first mapping, columns
            of the second. None for a mixer without products.
    """

    matrices: dict[str, Tensor]
    interactions: Tensor | None

    def density(self) -> dict[str, float]:
        """Return the share of non-zero entries of each matrix."""
        return {name: float((m != 0).double().mean()) for name, m in self.matrices.items()}


@torch.no_grad()
def mixer_mappings(mixer: nn.Module) -> Mappings:
    """Return the mappings of a mixer, either swapped in or the host's own.

    Raises:
        ValueError: The mixer maps channels by something other than matrices, such as a KAN.
    """
    owner, names = _owner(mixer)
    if owner is None:
        raise ValueError(
            f"{class_name(mixer)} does not map channels by one matrix; use a feed-forward "
            "network, GLU or a mixer of AFBO"
        )
    parts = dict(owner.named_modules())
    matrices = {name: dense(parts[name]) for name in names if name in parts}
    if isinstance(owner, ConvGLU):
        gate, value = matrices.pop("fc1").chunk(2)
        matrices = {"gate": gate, "value": value}
    factors = list(matrices.values())
    if len(names) == 2 and len(factors) == 1:  # both branches use one mapping
        factors *= 2
    layer = value_layer(owner)
    if len(factors) < 2 or layer is None:
        return Mappings(matrices, None)
    out = dense(owner.get_submodule(layer)).norm(dim=0)  # (h,)
    return Mappings(matrices, (factors[0].abs() * out[:, None]).T @ factors[1].abs())


def channel_mappings(backbone: Backbone) -> dict[str, Mappings]:
    """Return the mappings of all channel mixers that map by matrices, by name.

    Raises:
        ValueError: The network lacks such a channel mixer.
    """
    mappings = {
        name: mixer_mappings(mixer)
        for name, mixer in backbone.channel_mixers().items()
        if _owner(mixer)[0] is not None
    }
    if not mappings:
        raise ValueError(
            f"{backbone.name or type(backbone).__name__} lacks a channel mixer that maps channels "
            "by matrices; use a feed-forward network, GLU or a mixer of AFBO"
        )
    return mappings


def dense(layer: nn.Module) -> Tensor:
    """Return the matrix (out, in) of a layer that maps channels.

    Raises:
        ValueError: The layer is spatial, such as a 3x3 convolution.
    """
    if isinstance(layer, ChannelMapping | LowRankLinear | MonarchLinear):
        return layer.dense_weight().detach()
    if isinstance(layer, GroupedLinear):
        return torch.block_diag(*layer.weight.detach())
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor) and getattr(layer, "groups", 1) == 1:
        if weight.ndim == 2 or weight[0, 0].numel() == 1:
            return weight.detach().flatten(1)
    raise ValueError(f"{class_name(layer)} is not a matrix over channels")


def _owner(mixer: nn.Module) -> tuple[nn.Module | None, tuple[str, ...]]:
    """Return the submodule that contains the mappings, and their names; in timm, fc1."""
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
