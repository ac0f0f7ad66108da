"""Hierarchical rearrangement: linear layers over regions of rows and columns, shifted by block.

    y = W (a0 R_height(x) + a1 R_width(x) + a2 (V x + b))

R cuts an axis into regions of p tokens and maps the p C channels of each to C / 2 and back. The
shares a come from the means of all three branches (split attention).

Source: Guo et al., "Hire-MLP: Vision MLP via Hierarchical Rearrangement", CVPR 2022,
https://arxiv.org/abs/2108.13341; region sizes, shifts and the merge as in the authors' code.
Weights start truncated normal of 0.02. The host Hire-MLP uses the same layers.

Axes: B images, C channels, H W map, p rows of a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_multiple, check_range
from backbones.layers.graph_sizes import ceil_div, is_any_size, leading, missing
from backbones.layers.init import init_all
from backbones.layers.pointwise import PointwiseConv2d
from backbones.layers.reweight import Reweight
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

Linear = Callable[..., Tensor]
REGIONS = (4, 3, 3, 2)  # tokens of a region by stage
SHIFT_STEPS = (2, 2, 1, 1)  # tokens by which the shift grows from block to block
SHIFT_PERIODS = (2, 2, 3, 2)  # blocks until the shift returns to 0


def usual_shift(slot: Slot) -> int:
    """Return the authors' shift at a place in a host of up to four stages."""
    stage = min(slot.stage, 3)
    return slot.block % SHIFT_PERIODS[stage] * SHIFT_STEPS[stage]


class HireMixer(nn.Module):
    """proj(a0 R_height(x) + a1 R_width(x) + a2 (W x + b)), with the shares a of ``Reweight``.

    R cuts an axis into regions of p tokens and maps the p C channels of each to C / 2 and back:
    inner-region rearrangement. Shifting the map around the axis before, and back after it, is the
    cross-region rearrangement.

    Args:
        dim: Channels C, even.
        region: p.
        shift: Tokens by which the map is rolled forward.

    Shape: (B, C, H, W) -> (B, C, H, W). Parameters: (2 p + 3) C^2 + (2 p + 29 / 4) C.

    Source: Hire-MLP (CVPR 2022), hierarchical rearrangement.
    """

    def __init__(self, dim: int, region: int, shift: int) -> None:
        super().__init__()
        self.region, self.shift = region, shift
        region_dim, hidden = dim * region, dim // 2
        self.mlp_h1 = nn.Conv2d(region_dim, hidden, 1, bias=False)
        self.mlp_h1_norm = nn.BatchNorm2d(hidden)
        self.mlp_h2 = nn.Conv2d(hidden, region_dim, 1)
        self.mlp_w1 = nn.Conv2d(region_dim, hidden, 1, bias=False)
        self.mlp_w1_norm = nn.BatchNorm2d(hidden)
        self.mlp_w2 = nn.Conv2d(hidden, region_dim, 1)
        self.mlp_c = PointwiseConv2d(dim, dim)
        self.reweight = Reweight(dim, channels_first=True)
        self.proj = PointwiseConv2d(dim, dim)

    def forward(self, x: Tensor, linear: Linear = F.linear) -> Tensor:
        """Mix rows and columns and re-weight three branches: (B, C, H, W) -> (B, C, H, W).

        Args:
            x: (B, C, H, W).
            linear: Multiplies input, weight and, if there is one, bias.
        """
        y = to_nhwc(x)
        rows = (self.mlp_h1, self.mlp_h1_norm, self.mlp_h2)
        down = self._regions(y.transpose(1, 2), *rows, linear)
        across = self._regions(y, self.mlp_w1, self.mlp_w1_norm, self.mlp_w2, linear)
        down, across = to_nchw(down.transpose(1, 2)), to_nchw(across)
        return self.proj(self.reweight(down, across, self.mlp_c(x)))

    def _regions(
        self, x: Tensor, reduce: nn.Conv2d, norm: nn.Module, expand: nn.Conv2d, linear: Linear
    ) -> Tensor:
        """Map every region of the lines of (B, lines, L, C); a line's start fills the last one."""
        length, p = x.shape[2], self.region
        if self.shift:
            x = x.roll(self.shift, 2)
        if is_any_size((length,)):
            # A graph would keep for ever whether the last region was incomplete; no remainder,
            # since ONNX lacks one by a symbol.
            places = torch.arange(ceil_div(length, p) * p, device=x.device)
            x = x.index_select(2, torch.where(places < length, places, places - length))
        elif length % p:
            lacking = missing(length, p)
            x = torch.cat([x, *[x] * (lacking // length), x[:, :, : lacking % length]], 2)
        # The authors' channel c p + r is channel c of token r. Here tokens stay whole, the weights
        # move instead, and no axis counts regions: a graph would keep for ever that it is not 1.
        weight = reduce.weight.unflatten(1, (-1, p)).transpose(1, 2).flatten(1)
        regions = x.flatten(0, 2).reshape(-1, weight.shape[1])
        regions = F.relu(norm(linear(regions, weight)[..., None, None])).flatten(1)
        weight, bias = (
            parameter.unflatten(0, (-1, p)).transpose(0, 1).flatten(0, 1)
            for parameter in (expand.weight.flatten(1), cast("Tensor", expand.bias))
        )
        regions = linear(regions, weight, bias)
        x = leading(regions.view(-1, x.shape[3]).view(x.shape), 2, length)
        return x.roll(-self.shift, 2) if self.shift else x


@register_mixer("hire", kind="token", source="Hire-MLP (CVPR 2022)")
class HierarchicalRearrangement(Mixer):
    """Hire-MLP's token mixer; class tokens are not mixed: the host pools its map.

    A line's beginning fills its last region.

    Args:
        dim: Channels C, even.
        slot: Place in the host; its stage sets the region, its block the shift.
        region: p, tokens of a region; by default 4, 3, 3 or 2 by stage.
        shift: Tokens by which the map is rolled before; by default 0 in the first block of a stage
            and growing in the next one or two.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: (2 p + 3) C^2 + (2 p + 29 / 4) C.

    Raises:
        ValueError: A region below 1, a negative shift, or an odd number of channels.

    Source: Hire-MLP (CVPR 2022), https://arxiv.org/abs/2108.13341.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        region: int | None = None,
        shift: int | None = None,
    ) -> None:
        super().__init__()
        slot = slot or Slot(dim, 4.0, (14, 14), stage=0, block=0, dense=False)
        region = REGIONS[min(slot.stage, 3)] if region is None else region
        shift = usual_shift(slot) if shift is None else shift
        check_range("region", region, 1)
        check_range("shift", shift, 0)
        check_multiple("dim", dim, 2)
        self.layers = HireMixer(dim, region, shift)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Mix rows and columns: (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self.layers(to_nchw(x)))
