"""Where a mixer finds its compiled form; in a file that stands alone there is none."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backbones.layers.eager import ORDINARY, has_global_hooks


class FusedForm(Protocol):
    """What the module of a compiled form has."""

    def serves(self, mixer: Any, x: Tensor) -> bool:
        """Whether it computes just what this mixer is, on such a map."""

    def mix(self, mixer: Any, x: Tensor, prefix: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """What the mixer makes of a map (B, H, W, C) and, when given, prefix tokens (B, P, C)."""


# By the class of mixers; a mixer's package enters its own.
FUSED_FORMS: dict[type[nn.Module], FusedForm] = {}


def is_plain(mixer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all weights are of one type and whole in memory, and nobody waits for a part's call.

    This is asked in every pass: torch's own walks over modules and parameters take longer than a
    small map does. A weight that a parametrization computes may lie in memory in any order, and one
    that is no parameter, in a replica or a shard of a network, is not where a compiled form looks.
    Nor does it call a ``forward`` that somebody has put on a module, see missing values, or know
    what a quantised weight, which is a tensor of another class, stands for.
    """
    if has_global_hooks():
        return False
    modules = [mixer]
    for module in modules:
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or not module.__dict__.keys().isdisjoint(("weight", "forward"))
        ):
            return False
        for parameter in module._parameters.values():
            if parameter is not None and not (
                parameter.dtype is dtype
                and parameter.is_contiguous()
                and not parameter.is_meta
                and type(parameter) in ORDINARY
            ):
                return False
        if parts := module._modules:
            if "parametrizations" in parts:
                return False
            modules += [part for part in parts.values() if part is not None]
    return True
