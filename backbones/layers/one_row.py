"""Kernels for maps of one row: series and text.

With zeros around the map, a row only meets the centre row of a k x k kernel. The other rows add
parameters that never get a gradient, so mixers built for one row have 1 x k kernels instead.
"""

from __future__ import annotations

from torch import nn


def keep_centre_row(module: nn.Module) -> None:
    """Replace k x k kernels by their centre row, in place; maps of one row give the same output.

    Convolutions and mean pooling of stride 1 with zeros around the map are changed. Convolutions
    over windows, of stride k, keep their first row: a row padded to a window fills only that.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
            _narrow_conv(part)
        elif isinstance(part, nn.AvgPool2d):
            _narrow_pool(part)


def _narrow_conv(conv: nn.Conv2d | nn.ConvTranspose2d) -> None:
    height, width = conv.kernel_size
    around = [step * (side // 2) for step, side in zip(conv.dilation, (height, width), strict=True)]
    keeps_size = conv.padding == tuple(around)
    windows = conv.stride == conv.kernel_size and conv.padding == (0, 0)
    if height == 1 or not (keeps_size or windows) or conv.padding_mode != "zeros":
        return
    row = height // 2 if keeps_size else 0
    conv.weight = nn.Parameter(conv.weight.detach()[:, :, row : row + 1].clone())
    conv.kernel_size, conv.stride = (1, width), (1, conv.stride[1])
    beside = around[1] if keeps_size else 0
    conv.padding = (0, beside)
    conv._reversed_padding_repeated_twice = [beside, beside, 0, 0]


def _narrow_pool(pool: nn.AvgPool2d) -> None:
    size = pool.kernel_size
    side = size if isinstance(size, int) else size[0]
    if pool.stride in (1, (1, 1)) and pool.padding == side // 2 and not pool.count_include_pad:
        pool.kernel_size, pool.padding = (1, side), (0, side // 2)
