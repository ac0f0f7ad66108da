"""Feed-forward network of 1x1 convolutions, in hosts on NCHW maps and in Mix-FFN."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixer import Mixer


class ConvFFN(Mixer):
    """W2 GELU(W1 x), or W2 GELU(D(W1 x)) with a depthwise convolution D, all with bias.

    Prefix tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden: Hidden channels h.
        kernel_size: Side of D, odd; None leaves it out.
        relu: Apply ReLU before D, as the linear form of PVT v2.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self,
        dim: int,
        hidden: int,
        kernel_size: int | None = None,
        relu: bool = False,
        act: str = "gelu",
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        self.relu = relu
        self.fc1 = nn.Conv2d(dim, hidden, 1)
        self.dwconv = None
        if kernel_size is not None:
            padding = kernel_size // 2
            self.dwconv = nn.Conv2d(hidden, hidden, kernel_size, padding=padding, groups=hidden)
        self.fc2 = nn.Conv2d(hidden, dim, 1)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 GELU(D(W1 x)), or W2 GELU(W1 x): (B, H, W, C) -> (B, H, W, C)."""
        return self._convolved(x, self.dwconv)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens as a column of a map, without D: (B, P, C) -> (B, P, C)."""
        return self._convolved(prefix[:, :, None], None)[:, :, 0]

    def _convolved(self, x: Tensor, dwconv: nn.Module | None) -> Tensor:
        hidden = self.fc1(to_nchw(x))
        if self.relu:
            hidden = F.relu(hidden)
        if dwconv is not None:
            hidden = dwconv(hidden)
        return to_nhwc(self.fc2(self.act(hidden)))
