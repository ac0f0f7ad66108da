"""Kernels for maps of one row: series and text.

With zeros around the map, a row only meets the centre row of a k x k kernel. The other rows add
parameters that never get a gradient, so mixers built for one row have 1 x k kernels instead.
"""

from __future__ import annotations

from torch import nn


def keep_centre_row(module: nn.Module) -> None:
    """Replace k x k kernels by their centre row, in place; maps of one row give the same output.

    Only convolutions and mean pooling of stride 1 with k // 2 zeros around the map are changed.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            _narrow_conv(part)
        elif isinstance(part, nn.AvgPool2d):
            _narrow_pool(part)


def _narrow_conv(conv: nn.Conv2d) -> None:
    height, width = conv.kernel_size
    same = conv.padding == (height // 2, width // 2) and conv.dilation == (1, 1)
    if height == 1 or not same or conv.stride != (1, 1) or conv.padding_mode != "zeros":
        return
    centre = slice(height // 2, height // 2 + 1)
    conv.weight = nn.Parameter(conv.weight.detach()[:, :, centre].clone())
    conv.kernel_size, conv.padding = (1, width), (0, width // 2)
    conv._reversed_padding_repeated_twice = [width // 2, width // 2, 0, 0]


def _narrow_pool(pool: nn.AvgPool2d) -> None:
    size = pool.kernel_size
    side = size if isinstance(size, int) else size[0]
    if pool.stride in (1, (1, 1)) and pool.padding == side // 2 and not pool.count_include_pad:
        pool.kernel_size, pool.padding = (1, side), (0, side // 2)
