"""A linear layer whose matrix is block-diagonal: groups of channels that do not see each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor


class GroupedLinear(nn.Module):
    """Cut the channels into G runs and give each its own linear layer: a grouped 1x1 convolution.

    Parameters: in * out / G + out.

    Args:
        in_features: Input channels, a multiple of G.
        out_features: Output channels, a multiple of G.
        groups: G.
        option: Name of the number of groups in error messages.

    Shape: (..., in_features) -> (..., out_features).

    Raises:
        ValueError: A width that the groups do not divide.
    """

    def __init__(
        self, in_features: int, out_features: int, groups: int, option: str = "groups"
    ) -> None:
        super().__init__()
        check_divisor(option, groups, in_features, out_features)
        self.groups = groups
        self.weight = nn.Parameter(
            torch.empty(groups, out_features // groups, in_features // groups)
        )
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a truncated normal of 0.02 and zero the biases, as all hosts do."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each group's linear layer: (..., in_features) -> (..., out_features)."""
        if self.groups == 1:
            return F.linear(x, self.weight[0], self.bias)
        groups = (x.chunk(self.groups, -1), self.weight.unbind(), self.bias.chunk(self.groups))
        return torch.cat([F.linear(*group) for group in zip(*groups, strict=True)], dim=-1)
