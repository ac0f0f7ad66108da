"""Recursive gated convolution: products of one convolution's parts, of rising order and width.

    [p_0, q_0, ..., q_{n-1}] = W_in x,  q' = s D [q_0, ..., q_{n-1}]
    p_1 = p_0 * q'_0,  p_{k+1} = (W_k p_k) * q'_k,  y = W_out p_n

q_k has C / 2^(n-1-k) channels, D is a depthwise convolution, or HorNet-GF's global filter:
LN [D_3x3 z_1, F z_2] with z = LN q and the channels of both halves interleaved. F multiplies the
spectrum of the map by learnt weights.

Source: Rao et al., "HorNet: Efficient High-Order Spatial Interactions with Recursive Gated
Convolutions", NeurIPS 2022, https://arxiv.org/abs/2207.14284. Orders of 2 to 5 by stage, s = 1/3
and the initialisation are the authors'. They use the global filter in the last two stages.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_multiple, check_range
from backbones.layers.init import init_all
from backbones.layers.spectral import filter_spectrum
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot

Conv = Literal["depthwise", "global_filter"]


@register_mixer("gnconv", kind="token", source="HorNet (NeurIPS 2022)")
class RecursiveGatedConv(Mixer):
    """W_out p_n with p_{k+1} = (W_k p_k) * q'_k.

    Class tokens are not mixed: the host pools its map. The weights of the global filter belong to
    the map size that the host was built for and are interpolated for others.

    Args:
        dim: Channels C, a multiple of 2^(n-1).
        grid: Map size (H, W), for the global filter.
        slot: Place in the host; its stage sets the order.
        order: n; by default 2 in the first stage, 3 in the second and so on.
        conv: D is a "depthwise" convolution or a "global_filter".
        kernel_size: k, side of the depthwise D, odd; the global filter's is 3.
        scale: s, factor of D's output.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with n = 2 and a depthwise D:
    3.5 C^2 + 1.5 k^2 C + 5.5 C.

    Raises:
        ValueError: C is not a multiple of 2^(n-1).

    Source: HorNet (NeurIPS 2022), https://arxiv.org/abs/2207.14284.
    """

    def __init__(
        self,
        dim: int,
        *,
        grid: tuple[int, int] = (14, 14),
        slot: Slot | None = None,
        order: int | None = None,
        conv: Conv = "depthwise",
        kernel_size: int = 7,
        scale: float = 1 / 3,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        order = 2 + (slot.stage if slot else 0) if order is None else order
        check_range("order", order, 1)
        check_multiple(f"dim with order={order}", dim, 2 ** (order - 1))
        self.scale = scale
        self.widths = [dim >> halvings for halvings in reversed(range(order))]
        width = sum(self.widths)
        self.proj_in = nn.Linear(dim, self.widths[0] + width)
        self.dwconv: nn.Module
        if conv == "depthwise":
            reach = kernel_size // 2
            self.dwconv = nn.Conv2d(width, width, kernel_size, padding=reach, groups=width)
        else:
            self.dwconv = GlobalLocalFilter(width, grid)
            self.grid_axes = {"dwconv.filter": "H F C 2"}
        self.projs = nn.ModuleList(
            nn.Linear(*widths) for widths in zip(self.widths, self.widths[1:], strict=False)
        )
        self.proj_out = nn.Linear(dim, dim)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Return W_out p_n: (B, H, W, C) -> (B, H, W, C)."""
        p, q = self.proj_in(x).split((self.widths[0], sum(self.widths)), dim=-1)
        if self.grid_axes:
            weights = self.at_size("dwconv.filter", (x.shape[1], x.shape[2]))
            mixed = self.dwconv(q, weights)
        else:
            mixed = to_nhwc(self.dwconv(to_nchw(q)))
        first, *gates = (self.scale * mixed).split(self.widths, dim=-1)
        p = p * first
        for proj, factor in zip(self.projs, gates, strict=True):
            p = proj(p) * factor
        return self.proj_out(p)


class GlobalLocalFilter(nn.Module):
    """LN [D z_1, F z_2] with z = LN x, the channels of both halves interleaved.

    Args:
        dim: Channels D, even.
        grid: Map size (H, W) of the filter's weights.

    Shape: (B, H, W, D) -> (B, H, W, D). Parameters: 4.5 D + H (W // 2 + 1) D + 4 D.

    Raises:
        ValueError: An odd number of channels.
    """

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        check_multiple("dim with conv=global_filter", dim, 2)
        half = dim // 2
        self.pre_norm, self.post_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.dw = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
        self.filter = nn.Parameter(0.02 * torch.randn(grid[0], grid[1] // 2 + 1, half, 2))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Filter a map (B, H, W, D) by weights for its size (H, W // 2 + 1, D / 2, 2)."""
        local_half, global_half = self.pre_norm(x).chunk(2, dim=-1)
        parts = (to_nhwc(self.dw(to_nchw(local_half))), filter_spectrum(global_half, weights))
        return self.post_norm(torch.stack(parts, dim=-1).flatten(-2))
