"""A gated star block: the product of two branches, one of which sees its neighbours.

Source: Ma et al., "Rewrite the Stars", CVPR 2024, https://arxiv.org/abs/2403.19967, Fig. 2 (the
product x1 * x2) and Table 8 (the sum in its place).
"""

from typing import Literal

from torch import Tensor, nn

from backbones.base import Mixer, hidden_width
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.options import variant_of
from backbones.registry import register_mixer


@register_mixer(
    "gated_star",
    kind="channel",
    source="StarNet (CVPR 2024), Fig. 2",
    hidden_scale=2 / 3,
    options_on={"swin_*": {"kernel_size": 5}},
)
class GatedStar(Mixer):
    """W3 (GELU(DW(W1 x)) * W2 x), where DW is a depthwise convolution.

    Args:
        dim: Channels C.
        hidden_ratio: h / C.
        kernel_size: Side of the convolution, odd.
        join: How both branches are joined: "product" or "sum".
        drop: Dropout before and after W3.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    value_layer = "w3"
    channel_mappings = ("w1", "w2")  # of the product

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        kernel_size: int = 3,
        join: Literal["product", "sum"] = "product",
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        hidden = hidden_width(dim, hidden_ratio)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.depthwise = nn.Conv2d(
            hidden, hidden, kernel_size, padding=kernel_size // 2, groups=hidden
        )
        self.act = nn.GELU()
        self.w3, self.drop = nn.Linear(hidden, dim), nn.Dropout(drop)
        self.join = join
        if join == "sum":
            self.channel_mappings = ("w1",)

    def mix(self, x: Tensor) -> Tensor:
        return self._join(to_nhwc(self.depthwise(to_nchw(self.w1(x)))), self.w2(x))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        return self._join(self.w1(prefix), self.w2(prefix))

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        first = self.act(first)
        joined = first * second if self.join == "product" else first + second
        return self.drop(self.w3(self.drop(joined)))


@register_mixer("gated_star_sum", kind="channel", source="StarNet (CVPR 2024), Table 8")
@variant_of(GatedStar, fixed={"join": "sum"})
def gated_star_sum() -> None:
    """The sum of both branches."""
