"""Gated linear unit as a channel mixer, the counterpart in AFBO's and IFFN's tables.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202, Eq. 6
(SwiGLU: the gate is a SiLU). The "GLU" of AFBO's Table 1 and the "SwiGLU" of its Table 3 report one
accuracy, 72.6 for DeiT-T, so the gate is a SiLU here as well.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.init import init_all
from backbones.mixer import PointwiseMixer
from backbones.options import variant_of
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "glu",
    kind="channel",
    source="Shazeer 2020, Eq. 6; AFBO (ICLR 2025), Tables 1 and 11",
    hidden_scale=2 / 3,  # three matrices of 2/3 the width hold as much as the FFN's two
    published_on=("deit_t", "swin_t", "poolformer_s12", "poolformer_s24"),
)
class GLU(PointwiseMixer):
    """Gated linear unit: W3 (act(W1 x + b1) * (W2 x + b2)) + b3, each token by itself.

    Args:
        dim: Channels C.
        hidden_ratio: Hidden width over C; 8/3 matches the size of an FFN of ratio 4.
        act: Activation, such as "silu", "gelu", "sigmoid" (Dauphin et al. 2017) or "none"
            (bilinear); see ``layers.activations.create_activation``.
        drop: Dropout after the product and after W3.

    Shape: (..., C) -> (..., C). Parameters: 3 M C^2 + (2 M + 1) C.

    Source: Shazeer, 2020, Eq. 6, https://arxiv.org/abs/2002.05202.
    """

    value_layer = "w3"
    channel_mappings = ("w1", "w2")

    def __init__(
        self, dim: int, *, hidden_ratio: float = 8 / 3, act: str = "silu", drop: float = 0.0
    ) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        self.act = create_activation(act)
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W3 (act(W1 x + b1) * (W2 x + b2)) + b3: (..., C) -> (..., C)."""
        return self.drop(self.w3(self.drop(self.act(self.w1(x)) * self.w2(x))))


@register_mixer("bilinear", kind="channel", source="Shazeer 2020, Eq. 6 (FFN_Bilinear)")
@variant_of(GLU, fixed={"act": "none"})
def bilinear() -> None:
    """Build a GLU without activation: W3 ((W1 x + b1) * (W2 x + b2)) + b3."""
