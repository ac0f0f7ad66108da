"""A depthwise convolution along the rows of a map, for long kernels on series."""

from __future__ import annotations

from torch import Tensor, nn


class RowConv(nn.Conv2d):
    """A 1 x k kernel per channel; ``row_conv`` builds it.

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve each row: (B, C, H, W) -> (B, C, H, W)."""
        return super().forward(x)


def row_conv(channels: int, kernel_size: int, *, bias: bool = True) -> RowConv:
    """Build a convolution with k // 2 zeros at both ends of each row.

    Args:
        channels: C.
        kernel_size: k, odd.
        bias: Add a bias per channel.
    """
    return RowConv(
        channels, channels, (1, kernel_size), padding=(0, kernel_size // 2), groups=channels,
        bias=bias,
    )  # fmt: skip
