"""Average pooling with right gradients on every device, in every memory format.

torch's own has wrong gradients with ``padding`` for channels-last maps on CUDA (pytorch #188344)
and, compiled by Inductor, with ``ceil_mode`` (#198119). Zeros around the map and a factor per place
of the output give the same numbers by pooling without either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.graph_sizes import is_any_size, missing
from backbones.replace import replace, share_state

Pair = tuple[int, int]


def avg_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return what ``F.avg_pool2d`` returns: (B, C, H, W) -> (B, C, h, w)."""
    rest = [0, 0]
    if ceil_mode:
        sizes = zip(x.shape[-2:], kernel_size, stride, padding, strict=True)
        rest = [_overhang(*numbers) for numbers in sizes]
    around = [padding[1], padding[1] + rest[1], padding[0], padding[0] + rest[0]]
    if not is_any_size(around) and not any(around):
        return F.avg_pool2d(x, kernel_size, stride)
    y = F.avg_pool2d(F.pad(x, around), kernel_size, stride)
    if count_include_pad and not is_any_size(rest) and not any(rest):
        return y
    # Half precision would round a factor such as 9 / 6 twice.
    inside = x.new_ones(1, 1, *x.shape[-2:], dtype=torch.promote_types(x.dtype, torch.float32))
    if count_include_pad:
        inside = F.pad(inside, [padding[1], padding[1], padding[0], padding[0]], value=1.0)
        around = [0, rest[1], 0, rest[0]]
    share = F.avg_pool2d(F.pad(inside, around), kernel_size, stride)
    return y.mul_(share.reciprocal().to(y.dtype))


def _overhang(length: int, kernel_size: int, stride: int, padding: int) -> int:
    """Return how far the last window of ``ceil_mode`` reaches beyond the padded side."""
    if not padding and kernel_size == stride:
        return missing(length, stride)
    steps = (length + 2 * padding - kernel_size + stride - 1) // stride
    if steps * stride >= length + padding:  # it would lie in the padding alone
        steps -= 1
    return max(0, steps * stride + kernel_size - length - 2 * padding)


class AvgPool2d(nn.AvgPool2d):
    """``nn.AvgPool2d`` by ``avg_pool2d``."""

    def forward(self, x: Tensor) -> Tensor:
        """Pool a map: (B, C, H, W) -> (B, C, h, w)."""
        assert self.divisor_override is None
        kernel_size, stride, padding = (
            (side, side) if isinstance(side, int) else (side[0], side[1])
            for side in (self.kernel_size, self.stride, self.padding)
        )
        return avg_pool2d(
            x, kernel_size, stride, padding, ceil_mode=self.ceil_mode,
            count_include_pad=self.count_include_pad,
        )  # fmt: skip


class NeighbourMean(AvgPool2d):
    """Mean of the k x k neighbours inside the map, per channel.

    Args:
        kernel_size: k, odd.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__(kernel_size, 1, kernel_size // 2, count_include_pad=False)


def correct_pooling(network: nn.Module) -> None:
    """Replace each ``nn.AvgPool2d`` with padding or ``ceil_mode`` below a network by ours."""
    for name, part in [*network.named_modules(remove_duplicate=False)]:
        if type(part) is nn.AvgPool2d and part.divisor_override is None:
            if part.ceil_mode or part.padding not in (0, (0, 0)):
                replace(network, name, share_state(part, AvgPool2d))
