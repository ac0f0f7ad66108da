"""Group-rational KAN: a feed-forward network whose activations are learnt rational functions.

    y = W2 F2(W1 F1(x) + b1) + b2,  F(x) = (a_0 + ... + a_5 x^5) / (1 + |b_1 x + ... + b_4 x^4|)

The channels of a group share b, all channels share a. F1 starts as the identity, F2 as GELU.

Source: Yang and Wang, "Kolmogorov-Arnold Transformer", ICLR 2025,
https://arxiv.org/abs/2409.10594. Eight groups and the coefficients that F2 starts from
are those of the authors' code. Weights start normal of variance gain / fan-in, which keeps the
variance (Sec. 4.3); the code overwrites them with a deviation of 0.02.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

MOST_GROUPS = 8
Start = Literal["gelu", "swish", "identity"]
# Numerator, denominator and gain 1 / E[F(x)^2] of a standard normal x.
STARTS: dict[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    "identity": ((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), 1.0),
    "gelu": (
        (-0.00153969, 0.51692871, 0.44075827, 0.0972553, -0.00884418, -0.00378675),
        (-0.14171056, -0.06481231, -0.0444695, 0.01283776),
        2.3567850379928976,
    ),
    "swish": (
        (3.054879741e-07, 0.500000785, 0.249997834, 0.053266283, 0.005803035, 0.000275196),
        (-4.111554956e-06, 0.106528993, -1.26900074e-06, 0.000550233),
        2.8178205270359653,
    ),
}


@register_mixer("gr_kan", kind="channel", source="KAT (ICLR 2025)")
class GroupRationalKAN(PointwiseMixer):
    """W2 F2(W1 F1(x) + b1) + b2, class tokens among the tokens.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        groups: Groups of channels; by default the greatest common divisor of 8 and C.
        start: What F2 starts as.
        drop: Dropout after F2 and after W2.

    Shape: (..., C) -> (..., C). Parameters with 8 groups: 2 M C^2 + (M + 1) C + 76.

    Raises:
        ValueError: Groups that do not divide C and the hidden width.

    Source: KAT (ICLR 2025), https://arxiv.org/abs/2409.10594.
    """

    value_layer = "fc2"

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        groups: int | None = None,
        start: Start = "gelu",
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        groups = math.gcd(MOST_GROUPS, dim, hidden) if groups is None else groups
        check_divisor("groups", groups, dim, hidden)
        self.act1, self.act2 = GroupRational(groups, "identity"), GroupRational(groups, start)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)
        for layer, kind in ((self.fc1, "identity"), (self.fc2, start)):
            nn.init.normal_(layer.weight, std=math.sqrt(STARTS[kind][2] / layer.in_features))
            nn.init.zeros_(layer.bias)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 F2(W1 F1(x) + b1) + b2: (..., C) -> (..., C)."""
        hidden = self.drop(self.act2(self.fc1(self.act1(x))))
        return self.drop(self.fc2(hidden))


class GroupRational(nn.Module):
    """(a_0 + ... + a_5 x^5) / (1 + |b_1 x + ... + b_4 x^4|) with b per group of channels.

    Args:
        groups: Groups of neighbouring channels.
        start: Function that it starts as.

    Shape: (..., C) -> (..., C).
    """

    def __init__(self, groups: int, start: Start) -> None:
        super().__init__()
        above, below, _ = STARTS[start]
        self.weight_numerator = nn.Parameter(torch.tensor(above).unsqueeze(0))
        self.weight_denominator = nn.Parameter(torch.tensor(below).repeat(groups, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate both polynomials by Horner's rule, in float32 at least."""
        precise = torch.promote_types(x.dtype, torch.float32)
        grouped = x.to(precise).unflatten(-1, (len(self.weight_denominator), -1))
        above = self.weight_numerator.to(precise).unsqueeze(-1).unbind(1)
        below = self.weight_denominator.to(precise).unsqueeze(-1).unbind(1)
        top = horner(grouped, above)
        bottom = 1 + (grouped * horner(grouped, below)).abs()
        return (top / bottom).flatten(-2).to(x.dtype)


def horner(x: Tensor, coefficients: tuple[Tensor, ...]) -> Tensor:
    """Return c_0 + c_1 x + c_2 x^2 + ... for coefficients that broadcast to x."""
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = coefficient + value * x
    return value
