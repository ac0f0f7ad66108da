"""SwiGLU as EVA-02 builds it: a gated linear unit with a SiLU, in larger models with a norm inside.

Source: Fang et al., "EVA-02: A Visual Representation for Neon Genesis", 2023,
https://arxiv.org/abs/2303.11331 (base and large have the inner norm, tiny and small leave it out);
Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202, Eq. 6.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.mixers.glu import GLU
from backbones.registry import register_mixer


@register_mixer(
    "swiglu",
    kind="channel",
    source="EVA-02 (2023); AFBO (ICLR 2025), Table 3",
    hidden_scale=2 / 3,  # three matrices of 2/3 the width hold as much as the FFN's two
    published_on=("deit_t", "deit_s"),
)
class SwiGLU(GLU):
    """W3 norm(SiLU(W1 x + b1) * (W2 x + b2)) + b3, each token by itself.

    Args:
        dim: Channels C.
        hidden_ratio: Hidden width over C; 8/3 matches the size of an FFN of ratio 4.
        norm: LayerNorm of the product, as in EVA-02 base and large.
        act: Activation, such as "silu"; see ``layers.activations.create_activation``.
        drop: Dropout after the product and after W3.

    Shape: (..., C) -> (..., C). Parameters: 3 M C^2 + (2 M + 1) C; the norm adds 2 M C.

    Source: EVA-02 (2023), https://arxiv.org/abs/2303.11331.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 8 / 3,
        norm: bool = False,
        act: str = "silu",
        drop: float = 0.0,
    ) -> None:
        super().__init__(dim, hidden_ratio=hidden_ratio, act=act, drop=drop)
        self.norm = nn.LayerNorm(self.w3.in_features, eps=1e-6) if norm else nn.Identity()

    def mix(self, x: Tensor) -> Tensor:
        """Return W3 norm(SiLU(W1 x + b1) * (W2 x + b2)) + b3: (..., C) -> (..., C)."""
        hidden = self.norm(self.act(self.w1(x)) * self.w2(x))
        return self.drop(self.w3(self.drop(hidden)))
