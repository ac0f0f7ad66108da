"""Vision-RWKV's channel mix: a gated FFN with a squared ReLU behind a shift of channels.

    y = sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2,  x_k = m_k * x + (1 - m_k) * x',  x_r likewise

In x' four quarters of the channels come from a neighbour above, below, left or right (Q-shift).

Source: Duan et al., "Vision-RWKV: Efficient and Scalable Visual Perception with RWKV-Like
Architectures", ICLR 2025, https://arxiv.org/abs/2403.02308. Initialisation by depth as
in the authors' code, for 12 layers; deeper blocks start as the twelfth. Linear layers start as
torch's, as there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.q_shift import q_shift
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot, hidden_width

LAYERS = 12  # of the authors' networks, over which their initialisation changes


@register_mixer(
    "rwkv_channel_mix",
    kind="channel",
    source="Vision-RWKV (ICLR 2025)",
    unfit_for=dict.fromkeys(("gpt*", "ffnet_3d*"), "it shifts channels from four sides of a map"),
)
class RWKVChannelMix(Mixer):
    """sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2; class tokens are mapped alike without the shift.

    Args:
        dim: Channels C, at least 4.
        slot: Place in the host; its block sets the initialisation.
        hidden_ratio: M, hidden width over C.
        act: Activation in place of the squared ReLU; see ``layers.activations.create_activation``.
        whole_quarters: Shift four times int(C / 4) channels, as earlier versions; others stay.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: (2 M + 1) C^2 + 2 C.

    Source: Vision-RWKV (ICLR 2025), https://arxiv.org/abs/2403.02308.
    """

    value_layer = "value"

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        hidden_ratio: float = 4.0,
        act: str = "relu2",
        whole_quarters: bool = False,
    ) -> None:
        super().__init__()
        self.whole_quarters = whole_quarters
        hidden = hidden_width(dim, hidden_ratio)
        depth = min(slot.block if slot else 0, LAYERS - 1)
        share = (torch.arange(dim) / dim) ** (1 - depth / LAYERS)
        self.mix_k, self.mix_r = nn.Parameter(share), nn.Parameter(share.clone())
        self.act = create_activation(act)
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        """Shift, map and gate: (B, H, W, C) -> (B, H, W, C)."""
        return self.gated(x, q_shift(x, self.whole_quarters))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Map and gate without neighbours: (B, P, C) -> (B, P, C)."""
        return self.gated(prefix, prefix)

    def gated(self, x: Tensor, shifted: Tensor) -> Tensor:
        """Return sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2: (..., C) -> (..., C)."""
        difference = x - shifted
        value = self.value(self.act(self.key(shifted + self.mix_k * difference)))
        return F.sigmoid(self.receptance(shifted + self.mix_r * difference)) * value
