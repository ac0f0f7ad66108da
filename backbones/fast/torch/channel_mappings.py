"""AFBO's channel mappings as one product with the equivalent matrix, on a GPU in half precision.

Sliced products read and write each map several times: the pieces, their concatenation, the bias.
The matrix multiplies zeros as well, which a GPU's matrix units do in less time than the memory
takes for one of these copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.fast.base import FastModule
from backbones.layers.precision import product_dtype
from backbones.mixers.afbo.channel_mappings import (
    ChannelMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
)

HALF = frozenset({torch.bfloat16, torch.float16})


class FastChannelMapping(FastModule):
    """Shared by both mappings."""

    needs_operators = False
    is_traceable = True

    def serves(self, x: Tensor) -> bool:
        """Return True for half precision on a GPU."""
        return x.is_cuda and product_dtype(x) in HALF

    def compute(self: ChannelMapping, x: Tensor) -> Tensor:  # type: ignore[misc]
        """Multiply with the matrix and add b: (..., C) -> (..., h)."""
        return F.linear(x, self.dense_weight(), self.bias)


class FastGroupedCrossMapping(FastChannelMapping, GroupedCrossMapping):
    """GCCM."""


class FastOverlappedCycleMapping(FastChannelMapping, OverlappedCycleMapping):
    """OCCM."""
