"""Activations by name: torch's, timm's, and those that both lack.

Source: So et al., "Primer", NeurIPS 2021, https://arxiv.org/abs/2109.08668 (squared ReLU); Yu et
al., "MetaFormer Baselines for Vision", 2022, https://arxiv.org/abs/2210.13452 (StarReLU).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import create_act_layer
from torch import Tensor, nn


def unchanged(x: Tensor) -> Tensor:
    """Return x, where no activation is wanted."""
    return x


def relu2(x: Tensor) -> Tensor:
    """Return ReLU(x)^2."""
    return F.relu(x).square()


class StarReLU(nn.Module):
    """s ReLU(x)^2 + b with two learnt numbers, at first 1 and 0 as the authors' released code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return s ReLU(x)^2 + b."""
        return self.scale * relu2(x) + self.bias


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": relu2,
    "relu6": F.relu6,
    "sigmoid": F.sigmoid,
    "none": unchanged,
}


def create_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by its name: a function, or a module where it has state.

    Args:
        name: A key of ``FUNCTIONS``, "star_relu", or a name of timm's ``create_act``, such as
            "mish", "hard_swish", "quick_gelu" or "prelu".

    Raises:
        ValueError: Unknown name.

    >>> create_activation("mish")(torch.zeros(1))
    tensor([0.])
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name == "star_relu":
        return StarReLU()
    try:
        module: nn.Module | None = create_act_layer(name)
    except (KeyError, TypeError, AttributeError):
        module = None
    if module is None:  # timm's answer to an empty name
        raise ValueError(
            f"act must be one of {', '.join(FUNCTIONS)}, star_relu, or a name of timm's create_act "
            f"such as elu, mish, hard_swish, prelu; got {name!r}"
        )
    return module
