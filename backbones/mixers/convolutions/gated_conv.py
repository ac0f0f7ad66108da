"""Gated convolutional block: half of a linear layer gates the other half after a convolution.

    y = W2 (GELU(g) * [v_1, D v_2]),  (g, v) = W1 x

D is a depthwise convolution of the last channels of v.

Source: Yu and Wang, "MambaOut: Do We Really Need Mamba for Vision?", CVPR 2025,
https://arxiv.org/abs/2405.07992, Algorithm 1; after Dauphin et al., 2017,
https://arxiv.org/abs/1612.08083. MambaOut's block is this with a norm and a shortcut, both of which
are the host's here. Weights start truncated normal of 0.02, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.init import init_all
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width


class GatedConv(Mixer):
    """W2 (GELU(g) * [v_1, D v_2]).

    Args:
        dim: Channels C.
        hidden: h, channels of g and of v.
        kernel_size: k, side of D, odd.
        conv_ratio: r, channels that D convolves over C, at most h / C.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 C h + 2 h + (k^2 + 1) r C + C.

    Raises:
        ValueError: D would convolve none or more than h channels.
    """

    def __init__(
        self, dim: int, hidden: int, kernel_size: int, conv_ratio: float, act: str = "gelu"
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        check_odd(kernel_size)
        part = int(conv_ratio * dim)
        check_range("conv_ratio * dim", part, 1, hidden)
        self.parts = (hidden - part, part)
        self.fc1 = nn.Linear(dim, 2 * hidden)
        self.conv = nn.Conv2d(part, part, kernel_size, padding=kernel_size // 2, groups=part)
        self.fc2 = nn.Linear(hidden, dim)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 (GELU(g) * [v_1, D v_2]): (B, H, W, C) -> (B, H, W, C)."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        unmixed, inputs = value.split(self.parts, dim=-1)
        value = torch.cat([unmixed, to_nhwc(self.conv(to_nchw(inputs)))], dim=-1)
        return self.fc2(self.act(gate) * value)


@register_mixer("gated_conv", kind="token", source="MambaOut (CVPR 2025), Algorithm 1")
class GatedConvMixing(GatedConv):
    """MambaOut's block as a token mixer; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        expansion: h / C.
        kernel_size: k, side of the convolution, odd.
        conv_ratio: Channels that the convolution gets over C, at most ``expansion``.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 C h + 2 h + 50 C + C.

    Source: MambaOut (CVPR 2025), Algorithm 1, https://arxiv.org/abs/2405.07992.
    """

    def __init__(
        self,
        dim: int,
        *,
        expansion: float = 8 / 3,
        kernel_size: int = 7,
        conv_ratio: float = 1.0,
        act: str = "gelu",
    ) -> None:
        super().__init__(dim, hidden_width(dim, expansion), kernel_size, conv_ratio, act)
