"""The feed-forward network, what every other channel mixer replaces.

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, Sec. 3.3,
https://arxiv.org/abs/1706.03762; Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021,
https://arxiv.org/abs/2010.11929 (GELU); So et al., "Primer", NeurIPS 2021,
https://arxiv.org/abs/2109.08668 (squared ReLU); Yu et al., "MetaFormer Baselines for Vision", 2022,
https://arxiv.org/abs/2210.13452 (StarReLU).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from backbones.layers.activations import StarReLU, create_activation
from backbones.layers.init import init_all
from backbones.mixer import PointwiseMixer
from backbones.options import variant_of
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "ffn",
    kind="channel",
    source="Vaswani et al., NeurIPS 2017, Sec. 3.3; GELU as in ViT",
    options_on={"sbm_*": {"act": "silu"}},
)
class FFN(PointwiseMixer):
    """Feed-forward network: W2 act(W1 x + b1) + b2, each token by itself.

    On a plain host the name stands for the host's own FFN; changed options build this one instead,
    where the host's own is of this kind.

    Args:
        dim: Channels C.
        hidden_ratio: Hidden width over C.
        act: Activation, such as "gelu", "relu2" (ReLU squared) or "star_relu" (s ReLU^2 + b,
            learnt); see ``layers.activations.create_activation``.
        drop: Dropout after the activation and after W2.

    Shape: (..., C) -> (..., C).

    Source: Vaswani et al., NeurIPS 2017, Sec. 3.3, https://arxiv.org/abs/1706.03762.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        act: str = "gelu",
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.act = act
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        activation = create_activation(act)
        self.star = activation if isinstance(activation, StarReLU) else None
        self.activation = activation if self.star is None else None
        self.drop = nn.Dropout(drop)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 act(W1 x + b1) + b2: (..., C) -> (..., C)."""
        act: Any = self.activation if self.star is None else self.star
        hidden = self.drop(act(self.fc1(x)))
        return self.drop(self.fc2(hidden))


@register_mixer("relu2", kind="channel", source="Primer (NeurIPS 2021)")
@variant_of(FFN, fixed={"act": "relu2"})
def relu2_ffn() -> None:
    """Build the FFN with a squared ReLU."""


@register_mixer("star_relu", kind="channel", source="MetaFormer baselines (2022), StarReLU")
@variant_of(FFN, fixed={"act": "star_relu"})
def star_relu_ffn() -> None:
    """Build the FFN with StarReLU, whose two numbers are learnt."""
