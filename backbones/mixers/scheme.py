"""SCHEME: a wide FFN of block-diagonal mappings, in training beside a channel covariance attention.

    y = a1 W2 GELU(W1 x) + a2 CCA(x) in training,  y = W2 GELU(W1 x) in evaluation
    CCA(Z) = Z softmax(Z^T Z / sqrt(h))^T,  (a1, a2) = softmax(w) learned

Source: Sridhar et al., "SCHEME: Scalable Channel Mixer for Vision Transformers", 2023,
https://arxiv.org/abs/2312.00412, with the authors' code for the scale, for w and for dropping CCA
in evaluation. That code forms Z^T by a reshape, which mixes tokens with channels; here it is the
transpose. Its class for scheme_12 keeps CCA in evaluation, which ``cca="always"`` does.

Where the time goes in evaluation, by a profile on one thread of a CPU: scheme_12 has 1.50 times the
multiply-adds of an FFN of 4 C and takes 1.54 (192 channels, 14 x 14) to 1.73 times as long (96
channels, 56 x 56). The products are 94 and 86 % of it, and GELU of 8 C channels, twice an FFN's, 4
and 11 %.

Axes: Z is a map as (H W, C); h hidden channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.grouped_linear import GroupedLinear
from backbones.mixer import Mixer
from backbones.options import variant_of
from backbones.registry import register_mixer
from backbones.slots import hidden_width

Attends = Literal["train", "always", "off"]
UNFIT = {
    "deit_*": "its attention correlates the channels of a map, to which no class token belongs"
}


class Scheme(Mixer):
    """A block-diagonal FFN, mixed with a covariance attention over channels.

    Args:
        dim: Channels C, a multiple of g1 and g2.
        hidden_ratio: h / C.
        g1: Blocks of W1.
        g2: Blocks of W2.
        cca: When the attention takes part: "train", "always" or "off" (then w is not there).
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.
        drop: Dropout after the activation and after W2.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: C h (1 / g1 + 1 / g2) + h + C, and 2 for w.

    Raises:
        ValueError: Groups that do not divide C and h.

    Source: SCHEME (2023), https://arxiv.org/abs/2312.00412.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)
    ignores_order = True

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 8.0,
        g1: int,
        g2: int,
        cca: Attends = "train",
        act: str = "gelu",
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1 = GroupedLinear(dim, hidden, g1, option="g1")
        self.fc2 = GroupedLinear(hidden, dim, g2, option="g2")
        self.drop = nn.Dropout(drop)
        self.cca = cca
        if cca != "off":
            self.balance = nn.Parameter(torch.randn(2))

    def mix(self, x: Tensor) -> Tensor:
        """Return a1 W2 GELU(W1 x) + a2 CCA(x), or the first part: (B, H, W, C) -> the same."""
        y = self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
        if self.cca == "off" or (self.cca == "train" and not self.training):
            return y
        share = self.balance.softmax(dim=0)
        return share[0] * y + share[1] * self._covariance_attention(x)

    def _covariance_attention(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, 2)
        # Scaled before the product: sums over a large map do not fit into half precision.
        scaled = tokens * self.fc1.bias.numel() ** -0.5
        attention = (scaled.transpose(1, 2) @ tokens).softmax(dim=-1)  # (B, C, C)
        return (tokens @ attention.transpose(1, 2)).view(x.shape)


@register_mixer(
    "scheme_12",
    kind="channel",
    source="SCHEME (2023); AFBO (ICLR 2025), Table 3",
    hidden_scale=2.0,
    published_on=("poolformer_s12", "poolformer_s24", "swin_t"),
    unfit_for=UNFIT,
)
@variant_of(Scheme, defaults={"g1": 1, "g2": 2})
def scheme_12() -> None:
    """Build SCHEME with dense W1, two blocks in W2, eight times the width."""


@register_mixer(
    "scheme_44",
    kind="channel",
    source="SCHEME (2023); AFBO (ICLR 2025), Table 3",
    hidden_scale=2.0,
    published_on=("poolformer_s12", "swin_t"),
    unfit_for=UNFIT,
)
@variant_of(Scheme, defaults={"g1": 4, "g2": 4})
def scheme_44() -> None:
    """Build SCHEME with four blocks in W1 and in W2, eight times the width."""
