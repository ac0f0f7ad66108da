"""The initialisation that most hosts and mixers share: truncated normal of 0.02, zero biases."""

from __future__ import annotations

from torch import nn


def init_linear(module: nn.Module) -> None:
    """Initialise a linear layer; for ``module.apply``, which hands over every other part too."""
    if isinstance(module, nn.Linear):
        _init(module)


def init_all(module: nn.Module) -> None:
    """Initialise all linear layers and convolutions inside a module, in their order there."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            _init(part)


def _init(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
