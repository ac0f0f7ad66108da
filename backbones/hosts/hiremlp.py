"""Hire-MLP-Tiny and Small: fully connected layers over shifted regions of rows or columns.

Source: Guo et al., "Hire-MLP: Vision MLP via Hierarchical Rearrangement", CVPR 2022,
https://arxiv.org/abs/2108.13341; the authors' released code (github.com/ggjy/Hire-Wave-MLP.pytorch,
``mlp_based``) for the names of weights, region sizes and shifts. Its Tiny has 18.04 M parameters;
AFBO's tables quote 17.0 M. Weights start truncated normal with deviation 0.02.

Axes: B images, C channels, H W map, p rows of a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from backbones.base import HostConfig, Slot
from backbones.hosts.scaffolds.network_list import HIDDEN_RATIO, NetworkList
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import ceil_div, is_any_size, leading, missing
from backbones.layers.pointwise import PointwiseConv2d
from backbones.layers.reweight import Reweight
from backbones.registry import register_host

Linear = Callable[..., Tensor]
REGIONS = (4, 3, 3, 2)  # tokens of a region by stage
SHIFT_STEPS = (2, 2, 1, 1)  # tokens by which the shift grows from block to block
SHIFT_PERIODS = (2, 2, 3, 2)  # blocks until the shift returns to 0


class HireMLP(NetworkList):
    """Four maps at strides 4, 8, 16, 32; NCHW in channels_last memory inside.

    All norms are BatchNorm; a ReLU follows the convolutions between stages. Dense: a BatchNorm for
    each map; the authors synchronise theirs over GPUs (``trainer.sync_batchnorm=true``).

    Source: Hire-MLP, https://arxiv.org/abs/2108.13341.
    """

    channels_first = True
    block_layout = "nchw"
    embedding_norm = True

    def norm_layer(self, dim: int) -> nn.Module:
        """Build a BatchNorm."""
        return nn.BatchNorm2d(dim)

    def token_mixer(self, slot: Slot) -> nn.Module:
        """Build a mixer of the stage's regions, shifted by the block's place."""
        shift = slot.block % SHIFT_PERIODS[slot.stage] * SHIFT_STEPS[slot.stage]
        return HireMixer(slot.dim, REGIONS[slot.stage], shift)

    def ffn(self, dim: int) -> nn.Module:
        """Build an FFN of 1x1 convolutions."""
        return Mlp(dim, int(HIDDEN_RATIO * dim), use_conv=True)


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
        wide, narrow = dim * region, dim // 2
        self.mlp_h1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.mlp_h1_norm = nn.BatchNorm2d(narrow)
        self.mlp_h2 = nn.Conv2d(narrow, wide, 1)
        self.mlp_w1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.mlp_w1_norm = nn.BatchNorm2d(narrow)
        self.mlp_w2 = nn.Conv2d(narrow, wide, 1)
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
            # since ONNX has none by a symbol.
            places = torch.arange(ceil_div(length, p) * p, device=x.device)
            x = x.index_select(2, torch.where(places < length, places, places - length))
        elif length % p:
            x = torch.cat([x, x[:, :, : missing(length, p)]], 2)
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


@register_host("hiremlp_t", source="Hire-MLP (CVPR 2022)")
def hiremlp_t(config: HostConfig) -> HireMLP:
    """Widths 64 to 512, depths 2, 2, 4, 2."""
    refuse_pretrained("hiremlp_t", config)
    return HireMLP(config, (2, 2, 4, 2))


@register_host("hiremlp_s", source="Hire-MLP (CVPR 2022)")
def hiremlp_s(config: HostConfig) -> HireMLP:
    """Widths 64 to 512, depths 3, 4, 10, 3."""
    refuse_pretrained("hiremlp_s", config)
    return HireMLP(config, (3, 4, 10, 3))
