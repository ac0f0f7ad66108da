"""MogaNet's channel aggregation: a feed-forward network that reallocates its hidden channels.

    z = GELU(D W1 x),  y = W2 (z + s * (z - GELU(W3 z)))

D is a depthwise 3x3 convolution; W3 maps the hidden channels to one, s is a factor per channel.

Source: Li et al., "MogaNet: Multi-order Gated Aggregation Network", ICLR 2024,
https://arxiv.org/abs/2211.03295. Convolutions start by their fan-out and s at 1e-5, as in the
authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_fan_out
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer("ca_ffn", kind="channel", source="MogaNet (ICLR 2024)")
class ChannelAggregationFFN(Mixer):
    """W2 (z + s * (z - GELU(W3 z))) with z = GELU(D W1 x); class tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C; the authors' is 8 in their first two stages.
        kernel_size: k, side of D, odd.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 M C^2 + (k^2 + 4) M C + C + 1.

    Source: MogaNet (ICLR 2024), https://arxiv.org/abs/2211.03295.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self, dim: int, *, hidden_ratio: float = 4.0, kernel_size: int = 3, act: str = "gelu"
    ) -> None:
        super().__init__()
        self.act, self.decompose_act = create_activation(act), create_activation(act)
        check_odd(kernel_size)
        hidden, reach = hidden_width(dim, hidden_ratio), kernel_size // 2
        self.fc1, self.fc2 = nn.Conv2d(dim, hidden, 1), nn.Conv2d(hidden, dim, 1)
        self.dwconv = nn.Conv2d(hidden, hidden, kernel_size, padding=reach, groups=hidden)
        self.decompose = nn.Conv2d(hidden, 1, 1)
        self.sigma = nn.Parameter(torch.full((hidden, 1, 1), 1e-5))
        init_fan_out(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 (z + s * (z - GELU(W3 z))): (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self._aggregated(self.dwconv(self.fc1(to_nchw(x)))))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens as a column of a map, without D: (B, P, C) -> (B, P, C)."""
        column = to_nchw(prefix[:, :, None])
        return to_nhwc(self._aggregated(self.fc1(column)))[:, :, 0]

    def _aggregated(self, hidden: Tensor) -> Tensor:
        z = self.act(hidden)
        return self.fc2(z + self.sigma * (z - self.decompose_act(self.decompose(z))))
