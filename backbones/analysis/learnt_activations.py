"""Curves of activations with learnt coefficients, per channel.

Source: IFFN (Xu et al., ICML 2024, https://proceedings.mlr.press/v235/xu24n.html), Fig. 3, which
compares GELU, AGeLU and RPReLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbones.mixers.iffn.activations import Arb, Base, RPReLU


@dataclass(frozen=True)
class LearntActivation:
    """Activation with learnt coefficients.

    Attributes:
        kind: Name, such as "arb(gelu)".
        curves: (channels, points), its value per channel at the points.
        coefficients: Its learnt coefficients by name, (channels,) each.
    """

    kind: str
    curves: Tensor
    coefficients: dict[str, Tensor]


@torch.no_grad()
def learnt_activations(network: nn.Module, points: Tensor) -> dict[str, LearntActivation]:
    """Return all activations with learnt coefficients, by the names of their modules.

    Args:
        network: Any network.
        points: (points,) at which they are evaluated.

    Raises:
        ValueError: The network lacks them.
    """
    activations: dict[str, LearntActivation] = {}
    for name, module in network.named_modules():
        if any(name.startswith(f"{outer}.") for outer in activations) or not _is_learnt(module):
            continue
        parameters = {key: p.detach() for key, p in module.named_parameters()}
        channels = next(iter(parameters.values()))
        grid = points.to(channels)[:, None].expand(-1, len(channels))
        activations[name] = LearntActivation(_kind(module), module(grid).T, parameters)
    if not activations:
        raise ValueError(
            "the network lacks activations with learnt coefficients (AGeLU, PReLU or RPReLU); use "
            "the mixers iffn or affn"
        )
    return activations


def _is_learnt(module: nn.Module) -> bool:
    if isinstance(module, Base):
        return module.slope is not None
    return isinstance(module, Arb | RPReLU)


def _kind(module: nn.Module) -> str:
    if isinstance(module, Arb):
        return f"arb({module.base.name})"
    return "rprelu" if isinstance(module, RPReLU) else "prelu"
