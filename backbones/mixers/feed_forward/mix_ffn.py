"""Mix-FFN: a feed-forward network with a depthwise convolution before its activation.

    y = W2 GELU(D W1 x),  D a depthwise 3x3 convolution

Source: Xie et al., "SegFormer", NeurIPS 2021, https://arxiv.org/abs/2105.15203, Eq. 3; Wang et al.,
"PVT v2", CVMJ 2022, https://arxiv.org/abs/2106.13797; initialisation as in the code of both.
"""

from __future__ import annotations

import math

from torch import nn

from backbones.layers.init import init_all
from backbones.mixers.conv_ffn import ConvFFN
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer("mix_ffn", kind="channel", source="SegFormer (NeurIPS 2021), Eq. 3; PVT v2 (2022)")
class MixFFN(ConvFFN):
    """W2 GELU(D W1 x); class tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        kernel_size: k, side of D, odd.
        relu: Apply ReLU before D, as beside PVT v2's linear attention.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 M C^2 + (k^2 + 2) M C + C.

    Source: SegFormer (NeurIPS 2021), Eq. 3, https://arxiv.org/abs/2105.15203.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        kernel_size: int = 3,
        relu: bool = False,
        act: str = "gelu",
    ) -> None:
        check_odd(kernel_size)
        super().__init__(dim, hidden_width(dim, hidden_ratio), kernel_size, relu, act)
        init_all(self)
        if self.dwconv is not None:
            nn.init.normal_(self.dwconv.weight, std=math.sqrt(2) / kernel_size)  # by its fan-out
