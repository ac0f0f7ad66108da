"""Phase-aware token mixing: tokens are waves, whose phases decide how neighbours add up.

    y = W (a0 P_width(x) + a1 P_height(x) + a2 U x)
    P(x)_c = sum_k T_ck u_k,2c + T'_ck u_k,2c+1,  u = [z cos theta, z sin theta]
    z = V x,  theta = Theta(x)

k runs over the neighbours of a token in its row or column, and T and T' are weights per channel and
neighbour: the first half of the channels adds up cosines, the second half sines. Theta is a linear
layer, or a depthwise convolution, with batch norm and ReLU. The shares a come from the means of all
three branches (split attention).

Source: Tang et al., "An Image Patch is a Wave: Phase-Aware Vision MLP", CVPR 2022,
https://arxiv.org/abs/2111.12294. Neighbourhoods of 7, the merge and torch's initial
convolutions are the authors'. The equation is that of their code
(https://github.com/huawei-noah/Efficient-AI-Backbones), which gave the published numbers; with
``form="paper"`` channel c adds up its own cosine and sine, as in the text.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.pointwise import PointwiseConv2d
from backbones.layers.reweight import Reweight
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer

Phase = Literal["fc", "depthwise"]
Form = Literal["released", "paper"]


@register_mixer("wave", kind="token", source="WaveMLP (CVPR 2022), form of the released code")
class PhaseAwareMixing(Mixer):
    """W (a0 P_width(x) + a1 P_height(x) + a2 U x); class tokens are not mixed.

    The host pools its map.

    Args:
        dim: Channels C.
        phase: Theta is a linear layer ("fc") or a depthwise 3x3 convolution ("depthwise").
        form: A channel adds up two neighbouring channels of all cosines, then all sines, as in the
            released code ("released"), or its own cosine and sine ("paper").
        kernel_size: Neighbours in a row or column, odd.
        bias: Biases of V and U.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with "fc" and C a multiple of 4:
    7 C^2 + 153 C / 4.

    Source: WaveMLP (CVPR 2022), https://arxiv.org/abs/2111.12294.
    """

    def __init__(
        self,
        dim: int,
        *,
        phase: Phase = "fc",
        form: Form = "released",
        kernel_size: int = 7,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.form = form
        check_odd(kernel_size)
        self.along = Waves(dim, (1, kernel_size), phase, bias)
        self.across = Waves(dim, (kernel_size, 1), phase, bias)
        self.fc_c = PointwiseConv2d(dim, dim, bias=bias)
        self.reweight = Reweight(dim, channels_first=True)
        self.proj = PointwiseConv2d(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Merge rows, columns and the token itself: (B, H, W, C) -> (B, H, W, C)."""
        maps = to_nchw(x)
        along, across = (waves(maps, self.form) for waves in (self.along, self.across))
        merged = self.reweight(along, across, self.fc_c(maps))
        return to_nhwc(self.proj(merged))


class Waves(nn.Module):
    """P(x): sums of neighbours by amplitude and phase, (B, C, H, W) -> (B, C, H, W).

    Args:
        dim: Channels C.
        kernel: Sides of the neighbourhood.
        phase: Kind of Theta.
        bias: Bias of V.
    """

    def __init__(self, dim: int, kernel: tuple[int, int], phase: Phase, bias: bool) -> None:
        super().__init__()
        theta = (
            PointwiseConv2d(dim, dim)
            if phase == "fc"
            else nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        )
        self.theta = nn.Sequential(theta, nn.BatchNorm2d(dim), nn.ReLU())
        self.amplitude = PointwiseConv2d(dim, dim, bias=bias)
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.token_fc = nn.Conv2d(2 * dim, dim, kernel, padding=padding, groups=dim, bias=False)

    def forward(self, x: Tensor, form: Form) -> Tensor:
        """Unfold waves into cosine and sine and sum over neighbours."""
        theta, amplitude = self.theta(x), self.amplitude(x)
        parts = [amplitude * theta.cos(), amplitude * theta.sin()]
        paired = torch.stack(parts, dim=2).flatten(1, 2)
        return self.token_fc(paired if form == "paper" else torch.cat(parts, dim=1))
