"""Group FFN: a gated linear unit whose two input mappings are block-diagonal.

Source: Wu et al., "Asymmetric Factorized Bilinear Operation for Vision Transformer", ICLR 2025,
https://openreview.net/forum?id=MJyqwBVgMs, Eq. 5, Tables 1 and 13. Its size, 2 M d^2 / G + M d^2,
tells that there are two branches and that the last mapping is dense. The table's 5.0 M and 6.1 M
for four groups lie 0.16 M above and 0.08 M below that.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.grouped_linear import GroupedLinear
from backbones.layers.init import init_linear
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "group_ffn",
    kind="channel",
    source="AFBO (ICLR 2025), Eq. 5, Tables 1 and 13",
    published_on=("deit_t", "deit_s"),
)
class GroupFFN(PointwiseMixer):
    """W3 (act(W1 x + b1) * (W2 x + b2)) + b3 with block-diagonal W1, W2, each token by itself.

    Args:
        dim: Channels C, a multiple of ``groups``.
        hidden_ratio: M, hidden width over C.
        groups: G, blocks of W1 and of W2.
        act: Activation, such as "silu"; see ``layers.activations.create_activation``.
        drop: Dropout after the product and after W3.

    Shape: (..., C) -> (..., C). Parameters: (2 / G + 1) M C^2 + (2 M + 1) C.

    Raises:
        ValueError: Groups that do not divide C and the hidden width.

    Source: AFBO (ICLR 2025), Eq. 5, https://openreview.net/forum?id=MJyqwBVgMs.
    """

    value_layer = "w3"
    channel_mappings = ("w1", "w2")

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        groups: int = 2,
        act: str = "silu",
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        self.act = create_activation(act)
        self.w1 = GroupedLinear(dim, hidden, groups)
        self.w2 = GroupedLinear(dim, hidden, groups)
        self.w3 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)
        init_linear(self.w3)

    def mix(self, x: Tensor) -> Tensor:
        """Return W3 (act(W1 x + b1) * (W2 x + b2)) + b3: (..., C) -> (..., C)."""
        return self.drop(self.w3(self.drop(self.act(self.w1(x)) * self.w2(x))))
