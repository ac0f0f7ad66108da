"""Activations of the field that torch lacks.

Source: So et al., "Primer", NeurIPS 2021, https://arxiv.org/abs/2109.08668 (squared ReLU); Yu et
al., "MetaFormer Baselines for Vision", 2022, https://arxiv.org/abs/2210.13452 (StarReLU).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
