"""A linear layer whose matrix is block-diagonal: groups of channels that do not see each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from backbones.layers.eval_cache import in_graph


class GroupedLinear(nn.Module):
    """Cut the channels into G runs and give each its own linear layer: a grouped 1x1 convolution.

    Parameters: in * out / G + out.

    Args:
        in_features: Input channels, a multiple of G.
        out_features: Output channels, a multiple of G.
        groups: G.
        option: What users call the number of groups, for the message.

    Shape: (..., in_features) -> (..., out_features).

    Raises:
        ValueError: A width that the groups do not divide.
    """

    def __init__(
        self, in_features: int, out_features: int, groups: int, option: str = "groups"
    ) -> None:
        super().__init__()
        valid = [
            g for g in range(1, in_features + 1) if in_features % g == 0 and out_features % g == 0
        ]
        if groups not in valid:
            raise ValueError(
                f"{option} must divide the widths {in_features} and {out_features}: it must be one "
                f"of {valid}, got {groups}"
            )
        self.groups = groups
        self.weight = nn.Parameter(
            torch.empty(groups, out_features // groups, in_features // groups)
        )
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal of 0.02 and zero biases, as all hosts do."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features).

        Without autograd one batched product writes all groups into the output in place, 7 to 18 %
        faster on a CPU than products one by one and their concatenation; autograd, autocast,
        compilers and tracers do not know ``out=``. The dense matrix and a grouped convolution are
        slower, and a batched product with a copy after it is so with autograd.
        """
        if self.groups == 1:
            return F.linear(x, self.weight[0], self.bias)
        if _needs_plain_operators(x):
            pieces = zip(
                x.chunk(self.groups, dim=-1), self.weight, self.bias.chunk(self.groups), strict=True
            )
            return torch.cat([F.linear(*piece) for piece in pieces], dim=-1)
        blocks = x.reshape(-1, self.groups, x.shape[-1] // self.groups).transpose(0, 1)
        out = x.new_empty(blocks.shape[1], self.groups, self.weight.shape[1])
        bias = self.bias.view(self.groups, 1, -1)
        torch.baddbmm(bias, blocks, self.weight.transpose(1, 2), out=out.transpose(0, 1))
        return out.view(*x.shape[:-1], len(self.bias))


def _needs_plain_operators(x: Tensor) -> bool:
    device = x.device.type
    return (
        torch.is_grad_enabled()
        or (is_autocast_available(device) and torch.is_autocast_enabled(device))
        or in_graph()
    )
