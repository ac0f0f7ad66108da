"""A linear layer by whoever is the fastest here; in a file that stands alone that is torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.activations import ACTIVATIONS, Act, activate
from backbones.layers.eager import are_ordinary
from backbones.layers.fused_forms import is_plain

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Whom to ask before torch: whether it serves a tensor, and what computes; the compiled operators
# enter theirs.
FASTER: list[tuple[Callable[[Tensor], bool], Product]] = []
# The same for a layer and the activation behind it, of input, weight and bias.
ActProduct = Callable[[Tensor, Tensor, Tensor | None, Act], Tensor]
FASTER_ACT: list[tuple[Callable[[Tensor, Tensor, Tensor | None], bool], ActProduct]] = []


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + b: (..., C), (D, C) and (D,) -> (..., D)."""
    return (faster_linear(x, weight) or F.linear)(x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: Act) -> Tensor:
    """act(X W^T + b): (..., C), (D, C) and (D,) -> (..., D)."""
    for serves, product in FASTER_ACT:
        if serves(x, weight, bias):
            return product(x, weight, bias, act)
    return activate(linear(x, weight, bias), act)


def faster_linear(x: Tensor, weight: Tensor) -> Product | None:
    """Who is faster than torch for these tensors, if anybody is."""
    if weight.device != x.device or not are_ordinary(weight):
        return None
    return next((product for serves, product in FASTER if serves(x)), None)


class Linear(nn.Linear):
    """``nn.Linear`` by whoever is the fastest here: (..., C) -> (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        return linear(x, self.weight, self.bias)


def layer_act(layer: nn.Linear, x: Tensor, act: Act) -> Tensor:
    """act(layer(x)): of a ``Linear`` in one step, unless somebody waits for its call."""
    if type(layer) is not Linear:
        return ACTIVATIONS[act](layer(x))
    for serves, product in FASTER_ACT:
        if serves(x, layer.weight, layer.bias) and is_plain(layer, x.dtype):
            return product(x, layer.weight, layer.bias, act)
    return activate(layer(x), act)


def multiply_faster(module: nn.Module) -> None:
    """Let the plain linear layers of a module be ``Linear``; they stay the objects they are.

    A tool that looks for a layer's exact class, as ``torch.ao.quantization.quantize_dynamic`` does,
    has to be told of ``Linear`` as well.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            cast("Any", part).__class__ = Linear
