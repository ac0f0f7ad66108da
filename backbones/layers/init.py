"""Initialisations that hosts and mixers share: truncated normal of 0.02, or by the fan-out.

Biases start at zero.
"""

from __future__ import annotations

import math

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


def init_fan_out(module: nn.Module) -> None:
    """Initialise convolutions by N(0, 2 / fan-out) and linear layers by ``init_linear``.

    The fan-out of a convolution is that of one group, k_h k_w O / groups.
    """
    for part in module.modules():
        init_linear(part)
        if isinstance(part, nn.Conv2d):
            fan_out = math.prod(part.kernel_size) * part.out_channels // part.groups
            nn.init.normal_(part.weight, std=math.sqrt(2 / fan_out))
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def _init(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
