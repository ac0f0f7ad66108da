"""Star operation: the product of two linear maps, one of them activated.

    y = BN(W3 (ReLU6(W1 x + b1) * (W2 x + b2)) + b3)

Source: Ma et al., "Rewrite the Stars", CVPR 2024, https://arxiv.org/abs/2403.19967. The batch norm
and the initialisation are those of the authors' StarNet; its two depthwise convolutions are left
out, as they mix tokens. ``op="sum"`` is the paper's ablation.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.init import init_all
from backbones.layers.norms import normalise
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

Op = Literal["star", "sum"]


@register_mixer("star", kind="channel", source="StarNet (CVPR 2024)")
class Star(PointwiseMixer):
    """BN(W3 (ReLU6(W1 x + b1) * (W2 x + b2)) + b3), class tokens among the tokens.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C; with the FFN's it has 3/2 of its parameters.
        op: "star" multiplies both maps, "sum" adds them.
        norm: Batch norm at the end, as in StarNet.
        act: Activation, such as "relu6"; see ``layers.activations.create_activation``.

    Shape: (..., C) -> (..., C). Parameters: 3 M C^2 + (2 M + 1) C, and 2 C for the norm.

    Source: StarNet (CVPR 2024), https://arxiv.org/abs/2403.19967.
    """

    value_layer = "g"

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        op: Op = "star",
        norm: bool = True,
        act: str = "relu6",
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden = hidden_width(dim, hidden_ratio)
        self.f1, self.f2 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.g = nn.Linear(hidden, dim)
        self.norm = nn.BatchNorm1d(dim) if norm else None
        self.op = op
        self.channel_mappings = ("f1", "f2") if op == "star" else ()
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return BN(W3 (ReLU6(W1 x + b1) * (W2 x + b2)) + b3): (..., C) -> (..., C)."""
        first, second = self.act(self.f1(x)), self.f2(x)
        hidden = first * second if self.op == "star" else first + second
        return normalise(self.g(hidden), self.norm)
