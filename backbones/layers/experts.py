"""Feed-forward networks side by side, as experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation


class Experts(nn.Module):
    """n FFNs W2 act(W1 x + b1) + b2, each with tokens of its own.

    Args:
        count: n.
        dim: Channels C.
        hidden: Hidden width.
        act: Activation of all of them; see ``layers.activations.create_activation``.

    Shape: (B, n, p, C) -> (B, n, p, C). Weights start truncated normal of 0.02, biases at zero.
    """

    no_weight_decay = ("b1", "b2")

    def __init__(self, count: int, dim: int, hidden: int, act: str = "gelu") -> None:
        super().__init__()
        self.act = create_activation(act)
        self.w1 = nn.Parameter(torch.empty(count, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, dim))
        self.b1 = nn.Parameter(torch.zeros(count, 1, hidden))
        self.b2 = nn.Parameter(torch.zeros(count, 1, dim))
        for weight in (self.w1, self.w2):
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map the tokens of each expert."""
        return self.act(x @ self.w1 + self.b1) @ self.w2 + self.b2
