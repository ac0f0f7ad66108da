"""ConvNeXt V2's feed-forward network alone: global response normalisation of the hidden map.

    y = W2 GRN(GELU(W1 x + b1)) + b2

Source: Woo et al., "ConvNeXt V2", CVPR 2023, https://arxiv.org/abs/2301.00808, Sec. 3.2, Eq. 1 to 3
and Fig. 5. ``convnext_v2`` has the depthwise convolution and the norm before it as well.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.init import init_all
from backbones.mixer import Mixer
from backbones.mixers.convnext import GlobalResponseNorm
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "grn_ffn",
    kind="channel",
    source="ConvNeXt V2 (CVPR 2023), Sec. 3.2, Eq. 1 to 3",
    unfit_for=dict.fromkeys(("gpt*", "ffnet_3d*"), "its norm reads all tokens"),
)
class GRNFFN(Mixer):
    """W2 GRN(GELU(W1 x + b1)) + b2; a class token is normalised as a map of its own.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 M C^2 + (3 M + 1) C.

    Source: ConvNeXt V2 (CVPR 2023), Sec. 3.2, https://arxiv.org/abs/2301.00808.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)
    ignores_order = True

    def __init__(self, dim: int, *, hidden_ratio: float = 4.0, act: str = "gelu") -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.grn = GlobalResponseNorm(hidden)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 GRN(GELU(W1 x + b1)) + b2: (B, H, W, C) -> (B, H, W, C)."""
        return self.fc2(self.grn(self.act(self.fc1(x))))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix each prefix token as a map: (B, P, C) -> (B, P, C)."""
        return self.mix(prefix.flatten(0, 1)[:, None, None]).view_as(prefix)
