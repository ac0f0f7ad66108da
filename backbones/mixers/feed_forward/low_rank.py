"""Feed-forward network of low-rank matrices, a control for AFBO's factorisation at equal size.

    y = U2 V2 GELU(U1 V1 x + b1) + b2,  V1 and V2 map to r channels

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022,
https://arxiv.org/abs/2106.09685, Eq. 3, whose product of two matrices stands here for the whole
weight, as in Khodak et al., ICLR 2021, https://arxiv.org/abs/2105.01029. Factors are drawn so that
the entries of the products have the deviation of the dense matrices, 0.02.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.bounds import check_range
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

DEVIATION = 0.02


@register_mixer("low_rank", kind="channel", source="LoRA (ICLR 2022), Eq. 3, as a layer")
class LowRankFFN(PointwiseMixer):
    """U2 V2 GELU(U1 V1 x + b1) + b2, class tokens among the tokens.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        rank_ratio: Rank r of both matrices over C.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (..., C) -> (..., C). Parameters: 2 r (M + 1) C + (M + 1) C.

    Raises:
        ValueError: A rank below 1.

    Source: LoRA (ICLR 2022), Eq. 3, https://arxiv.org/abs/2106.09685.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self, dim: int, *, hidden_ratio: float = 4.0, rank_ratio: float = 0.5, act: str = "gelu"
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden, rank = hidden_width(dim, hidden_ratio), int(rank_ratio * dim)
        check_range("rank_ratio * dim", rank, 1)
        self.fc1, self.fc2 = LowRankLinear(dim, hidden, rank), LowRankLinear(hidden, dim, rank)

    def mix(self, x: Tensor) -> Tensor:
        """Return U2 V2 GELU(U1 V1 x + b1) + b2: (..., C) -> (..., C)."""
        return self.fc2(self.act(self.fc1(x)))


class LowRankLinear(nn.Sequential):
    """U V x + b of rank r: (..., in) -> (..., out)."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        down, up = nn.Linear(in_features, rank, bias=False), nn.Linear(rank, out_features)
        super().__init__(down, up)
        for factor in (down, up):
            nn.init.trunc_normal_(factor.weight, std=(DEVIATION * rank**-0.5) ** 0.5)
        nn.init.zeros_(up.bias)

    def dense_weight(self) -> Tensor:
        """Return U V (out, in)."""
        down, up = (cast("nn.Linear", part) for part in self)
        return up.weight @ down.weight
