"""Outlook attention: coefficients within each window come from its centre, without keys.

    y = W sum over windows of softmax(W_A m / sqrt d) [W_V x_1, ..., W_V x_K]

m is the mean of the t x t tokens in the middle of a window, from which its K x K coefficients are
read. Results are added where windows overlap.

Source: Yuan et al., "VOLO: Vision Outlooker for Visual Recognition", TPAMI 2022,
https://arxiv.org/abs/2106.13112. Windows of 3 x 3 in steps of 2, 32 channels per head, values
without bias and truncated normal weights of 0.02 are those of the authors' code.

Axes: B images, H W map, C channels, n heads of d channels, K = s^2 places in a window.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.layers.overlapping_windows import attend, gather, window_means
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("outlook", kind="token", source="VOLO (TPAMI 2022)")
class OutlookAttention(Mixer):
    """W sum over windows of softmax(W_A m / sqrt d) [W_V x_1, ..., W_V x_K].

    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.
        kernel_size: s, side of a window, odd.
        stride: t, distance of windows, at most (s + 1) / 2.
        qkv_bias: Add a bias to the values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 C^2 + s^4 n (C + 1) + C.

    Raises:
        ValueError: An even side, a stride out of range, or ``num_heads`` that does not divide C.

    Source: VOLO (TPAMI 2022), https://arxiv.org/abs/2106.13112.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        kernel_size: int = 3,
        stride: int = 2,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_range("stride", stride, 1, (kernel_size + 1) // 2)
        self.num_heads = usual_heads(dim, num_heads)
        self.side, self.stride = kernel_size, stride
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn = nn.Linear(dim, kernel_size**4 * self.num_heads)
        self.proj = nn.Linear(dim, dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Mix the values of each window: (B, H, W, C) -> (B, H, W, C)."""
        places, size = self.side**2, (x.shape[1], x.shape[2])
        logits = self.attn(window_means(x, self.stride))
        logits = logits.unflatten(-1, (self.num_heads, places, places))
        coefficients = (logits * (x.shape[-1] // self.num_heads) ** -0.5).softmax(dim=-1)
        values = gather(self.v(x), self.side, self.stride)
        return self.proj(attend(coefficients, values, size, self.stride))
