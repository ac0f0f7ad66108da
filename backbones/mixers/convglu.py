"""Convolutional GLU: a gated linear unit whose gate sees the neighbours.

Source: Shi, "TransNeXt: Robust Foveal Visual Perception for Vision Transformers", CVPR 2024,
https://arxiv.org/abs/2311.17132, Sec. 3.4, Fig. 4, with the authors' hidden width, 2/3 of the
FFN's. No one width fits the five rows of AFBO's Table 3: solved for it, they give 2.55 to 2.79 C.

Where the time goes, by a profile on one thread of a CPU: at 192 channels on 14 x 14 and 96 on 56 x
56 it has 1.02 and 1.03 times the multiply-adds of an FFN and takes 1.10 and 1.08 times as long,
4 and 9 % of it in the convolution, which moves more than it computes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "convglu",
    kind="channel",
    source="TransNeXt (CVPR 2024), Sec. 3.4; AFBO (ICLR 2025), Table 3",
    hidden_scale=2 / 3,
    published_on=("deit_t", "deit_s", "poolformer_s12", "poolformer_s24", "swin_t"),
)
class ConvGLU(Mixer):
    """W2 (GELU(DW(a)) * v) + b2 with (a, v) = W1 x + b1 and DW a depthwise 3x3 convolution.

    Class tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden_ratio: h / C; 8/3 matches the size of an FFN of ratio 4.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.
        drop: Dropout after the product and after W2.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 3 C h + 12 h + C.

    Source: TransNeXt (CVPR 2024), Sec. 3.4, https://arxiv.org/abs/2311.17132.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self, dim: int, *, hidden_ratio: float = 8 / 3, act: str = "gelu", drop: float = 0.0
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1 = nn.Linear(dim, 2 * hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, kernel_size=3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as the authors do: truncated normal of 0.02, the convolution by its fan-out."""
        for linear in (self.fc1, self.fc2):
            init_linear(linear)
        nn.init.normal_(self.dwconv.weight, std=(2 / 9) ** 0.5)
        if self.dwconv.bias is not None:
            nn.init.zeros_(self.dwconv.bias)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 (GELU(DW(a)) * v) + b2: (B, H, W, C) -> (B, H, W, C)."""
        a, value = self._branches(x)
        return self._combine(to_nhwc(self.dwconv(to_nchw(a))), value)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens without the convolution: (B, P, C) -> (B, P, C)."""
        return self._combine(*self._branches(prefix))

    def _branches(self, x: Tensor) -> list[Tensor]:
        # Two products instead of one that is cut: each half is then contiguous, as the convolution
        # in channels_last memory wants it.
        halves = zip(self.fc1.weight.chunk(2), self.fc1.bias.chunk(2), strict=True)
        return [F.linear(x, weight, bias) for weight, bias in halves]

    def _combine(self, a: Tensor, value: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(a) * value)))
