"""The ConvNeXt blocks, version 1 and 2, as channel mixers: a depthwise 7x7 before the FFN.

The residual around the block is the host's.

Source: Liu et al., "A ConvNet for the 2020s", CVPR 2022, https://arxiv.org/abs/2201.03545, Fig. 4;
Woo et al., "ConvNeXt V2", CVPR 2023, https://arxiv.org/abs/2301.00808, Sec. 3.2 (global response
normalisation) and Fig. 5.

Where the time of version 2 goes, by a profile on one thread of a CPU: it has 1.03 (192 channels,
14 x 14) and 1.06 times (96 channels, 56 x 56) the multiply-adds of an FFN and takes 1.16 and 1.12
times as long. The convolution is 3 to 4 % of it; the rest of the difference is the response
normalisation, which needs norms over the whole map before it can scale, so that it goes over the
hidden map twice more and no pass can be joined with the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_all
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width


class ConvNeXtFFN(Mixer, ABC):
    """Base class of both versions: depthwise convolution, LayerNorm and an FFN.

    Class tokens skip the convolution.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(self, dim: int, hidden_ratio: float, kernel_size: int) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        check_odd(kernel_size)
        self.dwconv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        init_all(self)  # as the authors: the convolution included

    def mix(self, x: Tensor) -> Tensor:
        """Apply the depthwise convolution, then the FFN: (B, H, W, C) -> (B, H, W, C)."""
        return self._pointwise(to_nhwc(self.dwconv(to_nchw(x))))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix each prefix token as a map, without the convolution: (B, P, C) -> (B, P, C)."""
        maps = prefix.flatten(0, 1)[:, None, None]
        return self._pointwise(maps).view_as(prefix)

    @abstractmethod
    def _pointwise(self, x: Tensor) -> Tensor:
        """Mix the channels of each place of a map: (B, H, W, C) -> the same."""


@register_mixer(
    "convnext",
    kind="channel",
    source="ConvNeXt (CVPR 2022), Fig. 4; AFBO (ICLR 2025), Table 3",
    published_on=("deit_t",),
)
class ConvNeXtMixer(ConvNeXtFFN):
    """ConvNeXt's branch: gamma * (W2 GELU(W1 LN(DW(x)) + b1) + b2).

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        kernel_size: k, side of the depthwise convolution, odd.
        layer_scale: Value that gamma, one factor per channel, starts from.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 2 M C^2 + (M + k^2 + 5) C.

    Source: ConvNeXt (CVPR 2022), Fig. 4, https://arxiv.org/abs/2201.03545.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        kernel_size: int = 7,
        layer_scale: float = 1e-6,
        act: str = "gelu",
    ) -> None:
        super().__init__(dim, hidden_ratio, kernel_size)
        self.act = create_activation(act)
        self.gamma = nn.Parameter(torch.full((dim,), float(layer_scale)))

    def _pointwise(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm(x)))) * self.gamma


@register_mixer(
    "convnext_v2",
    kind="channel",
    source="ConvNeXt V2 (CVPR 2023), Sec. 3.2, Fig. 5",
    unfit_for=dict.fromkeys(("gpt*", "ffnet_3d*"), "its norm reads all tokens"),
)
class ConvNeXtV2Mixer(ConvNeXtFFN):
    """ConvNeXt V2's branch: W2 GRN(GELU(W1 LN(DW(x)) + b1)) + b2.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        kernel_size: k, side of the depthwise convolution, odd.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 2 M C^2 + (3 M + k^2 + 4) C.

    Source: ConvNeXt V2 (CVPR 2023), Fig. 5, https://arxiv.org/abs/2301.00808.
    """

    def __init__(
        self, dim: int, *, hidden_ratio: float = 4.0, kernel_size: int = 7, act: str = "gelu"
    ) -> None:
        super().__init__(dim, hidden_ratio, kernel_size)
        self.act = create_activation(act)
        self.grn = GlobalResponseNorm(self.fc1.out_features)

    def _pointwise(self, x: Tensor) -> Tensor:
        return self.fc2(self.grn(self.act(self.fc1(self.norm(x)))))


class GlobalResponseNorm(nn.Module):
    """gamma * (x * n) + beta + x, where n_c is channel c's norm over the map by the channels' mean.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Source: ConvNeXt V2, Sec. 3.2, Eq. 1 to 3; beta and the identity as in its Algorithm 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return gamma * (x * n) + beta + x, Eq. 1 to 3: (B, H, W, C) -> (B, H, W, C)."""
        # A norm over the outer axes takes torch five times as long as this. Squares of halves would
        # overflow; the root of 0, of a channel that is off, lacks a gradient.
        precise = x.float() if x.dtype is torch.float16 else x
        squares = precise.flatten(1, 2).square().sum(dim=1)[:, None, None]
        norms = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()
        response = norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)
        response = response.to(self.weight.dtype)
        # The factor is small, so this reads and writes the map once.
        return torch.addcmul(self.bias, x, 1 + self.weight * response)
