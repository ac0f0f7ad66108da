"""Cycle FC: linear layers that read each channel from a neighbouring token of the row or column.

    y = W (a0 FC_width(x) + a1 FC_height(x) + a2 V x)

The shares a come from the means of all three branches (split attention).

Source: Chen et al., "CycleMLP: A MLP-like Architecture for Dense Prediction", ICLR 2022,
https://arxiv.org/abs/2107.10224; the authors' code for the merge and for the offsets: its layer
``sfc_h`` shifts along the width and ``sfc_w`` along the height. Weights start truncated normal of
0.02. The host CycleMLP uses this class.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.graph_sizes import is_any_size
from backbones.layers.init import init_all
from backbones.layers.reweight import Reweight
from backbones.mixer import Mixer
from backbones.registry import register_mixer

ROWS, COLUMNS = 1, 2  # axes of (B, H, W, C)


class CycleMixer(Mixer):
    """proj(a0 FC_width(x) + a1 FC_height(x) + a2 W x), with the shares a of ``Reweight``.

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2 + 25 C / 4.

    Source: CycleMLP (ICLR 2022); the authors' code for the names and the biases.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp_c = nn.Linear(dim, dim, bias=False)
        self.sfc_h = CycleFC(dim, COLUMNS)
        self.sfc_w = CycleFC(dim, ROWS)
        self.reweight = Reweight(dim)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Mix rows and columns and weight three branches: (B, H, W, C) -> (B, H, W, C)."""
        return self.proj(self.reweight(self.sfc_h(x), self.sfc_w(x), self.mlp_c(x)))


class CycleFC(nn.Conv2d):
    """A linear layer whose input channel i comes from the token (i + 1) mod 3 - 1 places on.

    Channels 0, 3, ... are the token's own, 1, 4, ... the next one's along ``axis``, 2, 5, ... the
    previous one's; beyond the map there are zeros. A 1x1 convolution in its weights only.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: CycleMLP (ICLR 2022), Cycle FC; the authors compute it as a deformable convolution.
    """

    def __init__(self, dim: int, axis: int) -> None:
        super().__init__(dim, dim, 1)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """W times the shifted channels, plus b: (B, H, W, C) -> (B, H, W, C)."""
        shift = _cycled_any_size if is_any_size(x.shape[1:3]) else cycled
        return F.linear(shift(x, self.axis), self.weight.flatten(1), self.bias)


def cycled(x: Tensor, axis: int) -> Tensor:
    """Take channels 1, 4, ... from the next token along an axis and 2, 5, ... from the previous.

    The copies of strided channels took 0.4 ms for both axes of a map of 56x56x64 on one CPU core;
    a choice between padded maps (``torch.where``) took 1.4, concatenated thirds 0.6.

    Args:
        x: (B, H, W, C).
        axis: 1 or 2.
    """
    y = x.clone()
    rest = x.shape[axis] - 1
    for first_channel, to, start in ((1, 0, 1), (2, 1, 0)):
        source, target = x[..., first_channel::3], y[..., first_channel::3]
        target.narrow(axis, to, rest).copy_(source.narrow(axis, start, rest))
        target.narrow(axis, rest if to == 0 else 0, 1).zero_()
    return y


def _cycled_any_size(x: Tensor, axis: int) -> Tensor:
    """``cycled`` for graphs that serve any size: no slice of it may have a length of 1."""
    padded = F.pad(x, (0, 0, *((0, 0, 1, 1) if axis == ROWS else (1, 1))))
    ahead, behind = padded.narrow(axis, 2, x.shape[axis]), padded.narrow(axis, 0, x.shape[axis])
    place = torch.arange(x.shape[-1], device=x.device) % 3
    return torch.where(place == 1, ahead, torch.where(place == 2, behind, x))


@register_mixer("cycle_fc", kind="token", source="CycleMLP (ICLR 2022)")
def cycle_fc(dim: int) -> CycleMixer:
    """Build CycleMLP's token mixer; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 5 C^2 + 25 C / 4.

    Source: CycleMLP (ICLR 2022), https://arxiv.org/abs/2107.10224.
    """
    mixer = CycleMixer(dim)
    init_all(mixer)
    return mixer
