"""Gated linear unit behind a depthwise convolution of both its branches, SANA's Mix-FFN.

    (v, g) = D SiLU(W1 x + b1),  y = W2 (v * SiLU(g))

D is a depthwise 3x3 convolution of both branches.

Source: Xie et al., "SANA: Efficient High-Resolution Image Synthesis with Linear Diffusion
Transformers", ICLR 2025, https://arxiv.org/abs/2410.10629; SiLU before D, W2 without bias and the
width of 2.5 C as in the authors' released code (GLUMBConv), which initialises as torch.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer("dw_glu", kind="channel", source="SANA (ICLR 2025)", hidden_scale=2.5 / 4)
class DepthwiseGLU(Mixer):
    """W2 (v * SiLU(g)) with (v, g) = D SiLU(W1 x + b1); class tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden_ratio: M, channels of v and of g over C.
        kernel_size: k, side of D, odd.
        act: Activation before D and of the gate, such as "silu"; see
            ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 M C^2 + 2 (k^2 + 2) M C.

    Source: SANA (ICLR 2025), https://arxiv.org/abs/2410.10629.
    """

    value_layer = "conv_point"
    channel_mappings = ("conv_inverted",)

    def __init__(
        self, dim: int, *, hidden_ratio: float = 2.5, kernel_size: int = 3, act: str = "silu"
    ) -> None:
        super().__init__()
        self.act, self.gate_act = create_activation(act), create_activation(act)
        check_odd(kernel_size)
        hidden = hidden_width(dim, hidden_ratio)
        self.conv_inverted = nn.Linear(dim, 2 * hidden)
        self.conv_depth = nn.Conv2d(
            2 * hidden, 2 * hidden, kernel_size, padding=kernel_size // 2, groups=2 * hidden
        )
        self.conv_point = nn.Linear(hidden, dim, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 (v * SiLU(g)): (B, H, W, C) -> (B, H, W, C)."""
        return self._gated(to_nhwc(self.conv_depth(to_nchw(self.act(self.conv_inverted(x))))))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens without D: (B, P, C) -> (B, P, C)."""
        return self._gated(self.act(self.conv_inverted(prefix)))

    def _gated(self, hidden: Tensor) -> Tensor:
        value, gate = hidden.chunk(2, dim=-1)
        return self.conv_point(value * self.gate_act(gate))
