"""MambaOut's gated convolutional block as a channel mixer, in the place of a feed-forward network.

    y = W2 (GELU(g) * [v_1, D v_2]),  (g, v) = W1 x

Source: Yu and Wang, "MambaOut: Do We Really Need Mamba for Vision?", CVPR 2025,
https://arxiv.org/abs/2405.07992, Algorithm 1; ``gated_conv`` is the token mixer.
"""

from __future__ import annotations

from torch import Tensor

from backbones.mixers.convolutions.gated_conv import GatedConv
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "gated_conv_ffn",
    kind="channel",
    source="MambaOut (CVPR 2025), Algorithm 1",
    hidden_scale=2 / 3,
)
class GatedConvFFN(GatedConv):
    """W2 (GELU(g) * [v_1, D v_2]); class tokens skip the convolution.

    Args:
        dim: Channels C.
        hidden_ratio: M, channels of g and of v over C; 8/3 matches the size of an FFN of ratio 4.
        kernel_size: k, side of D, odd.
        conv_ratio: Channels that D convolves over C, at most M.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 M C^2 + (2 M + k^2 + 2) C.

    Source: MambaOut (CVPR 2025), Algorithm 1, https://arxiv.org/abs/2405.07992.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 8 / 3,
        kernel_size: int = 7,
        conv_ratio: float = 1.0,
        act: str = "gelu",
    ) -> None:
        super().__init__(dim, hidden_width(dim, hidden_ratio), kernel_size, conv_ratio, act)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Return W2 (GELU(g) * v), without the convolution: (B, P, C) -> (B, P, C)."""
        gate, value = self.fc1(prefix).chunk(2, dim=-1)
        return self.fc2(self.act(gate) * value)
