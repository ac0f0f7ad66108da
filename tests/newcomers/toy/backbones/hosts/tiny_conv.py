"""Convolutions along a signal.

Source: an example.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo, HostConfig
from backbones.registry import register_host

WIDTH, DEPTH, STRIDE = 16, 2, 4


class TinyConv(Backbone):
    """A patch embedding and residual convolutions.

    Shape: (B, 1, L) -> a map (B, C, ceil(L / 4)).
    """

    token_slots = channel_slots = ()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, WIDTH, STRIDE, STRIDE)
        self.blocks = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(DEPTH))
        self.feature_info = (FeatureInfo(WIDTH, STRIDE),)
        self.num_features = WIDTH

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return signals of the built length."""
        return (torch.rand(2, 1, self.img_size[1]),)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 1, L) -> one map."""
        x = self.stem(F.pad(images, (0, -images.shape[-1] % STRIDE)))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return (x,)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 1, L) -> (B, C), the mean of the map."""
        return self(images)[0].mean(-1)


@register_host("tiny_conv", slots=(), source="an example", modality="signal")
def tiny_conv(config: HostConfig) -> TinyConv:
    """Width 16, 2 blocks."""
    return TinyConv()
