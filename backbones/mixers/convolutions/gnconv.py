"""Recursive gated convolution: products of one convolution's parts, of rising order and width.

    [p_0, q_0, ..., q_{n-1}] = W_in x,  q' = s D [q_0, ..., q_{n-1}]
    p_1 = p_0 * q'_0,  p_{k+1} = (W_k p_k) * q'_k,  y = W_out p_n

q_k has C / 2^(n-1-k) channels, D is a depthwise convolution.

Source: Rao et al., "HorNet: Efficient High-Order Spatial Interactions with Recursive Gated
Convolutions", NeurIPS 2022, https://arxiv.org/abs/2207.14284. Orders of 2 to 5 by stage, s = 1/3
and the initialisation are the authors'. Their global filter in the place of D is left out.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.base import Mixer, Slot
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_all
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("gnconv", kind="token", source="HorNet (NeurIPS 2022)")
class RecursiveGatedConv(Mixer):
    """W_out p_n with p_{k+1} = (W_k p_k) * q'_k.

    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, a multiple of 2^(n-1).
        order: n; by default 2 in the first stage, 3 in the second and so on.
        kernel_size: k, side of D, odd.
        scale: s, factor of D's output.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with n = 2: 3.5 C^2 + 1.5 k^2 C +
    5.5 C.

    Raises:
        ValueError: C is not a multiple of 2^(n-1).

    Source: HorNet (NeurIPS 2022), https://arxiv.org/abs/2207.14284.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        order: int | None = None,
        kernel_size: int = 7,
        scale: float = 1 / 3,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        order = 2 + (slot.stage if slot else 0) if order is None else order
        if order < 1 or dim % 2 ** (order - 1):
            raise ValueError(
                f"order must be at least 1 and 2^(order - 1) divide the {dim} channels, got {order}"
            )
        self.scale = scale
        self.widths = [dim >> halvings for halvings in reversed(range(order))]
        wide = sum(self.widths)
        self.proj_in = nn.Linear(dim, self.widths[0] + wide)
        self.dwconv = nn.Conv2d(wide, wide, kernel_size, padding=kernel_size // 2, groups=wide)
        self.projs = nn.ModuleList(
            nn.Linear(*widths) for widths in zip(self.widths, self.widths[1:], strict=False)
        )
        self.proj_out = nn.Linear(dim, dim)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W_out p_n: (B, H, W, C) -> (B, H, W, C)."""
        p, q = self.proj_in(x).split((self.widths[0], sum(self.widths)), dim=-1)
        factors = self.scale * to_nhwc(self.dwconv(to_nchw(q)))
        first, *others = factors.split(self.widths, dim=-1)
        p = p * first
        for proj, factor in zip(self.projs, others, strict=True):
            p = proj(p) * factor
        return self.proj_out(p)
