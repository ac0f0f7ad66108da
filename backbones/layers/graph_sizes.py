"""Sizes that may be symbols: arithmetic and cuts that stay right in an exported or compiled graph.

A graph that serves any image size has symbols for height and width. Whatever compares or divides
them goes through here, so that no answer for one size is recorded as the answer for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# torch 2.6 cannot tell an export from torch.compile.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def is_any_size(size: Sequence[int]) -> bool:
    """Return True in an export where a size is a symbol, so that the graph serves any size.

    Compilers may guard on a comparison of sizes and record again; an exported graph would keep the
    answer for ever.
    """
    return any(isinstance(side, torch.SymInt) for side in size) and is_exporting()


def same_size(size: Sequence[int], second_size: Sequence[int]) -> bool:
    """Return True if two sizes are equal, False if either is any size."""
    return not is_any_size(size) and tuple(size) == tuple(second_size)


def crop(x: Tensor, height: int, width: int, rows: int = 2) -> Tensor:
    """Crop a map to its upper left part, (B, C, height, width); NHWC with ``rows=1``."""
    return leading(leading(x, rows, height), rows + 1, width)


def leading(x: Tensor, axis: int, length: int) -> Tensor:
    """Return the first ``length`` places of an axis, as a view unless any size is exported."""
    if is_any_size((length,)):
        # A graph would compare a view's strides with memory formats and keep the answer for ever.
        return x.index_select(axis, torch.arange(length, device=x.device))
    return x.narrow(axis, 0, length)


def whole_window(x: Tensor, sides: Sequence[int]) -> Tensor:
    """Prepare a map (B, C, H, W) for a convolution whose sides are also its strides.

    A map smaller than one window is padded with zeros to it. An export for any size leaves all maps
    as they are.
    """
    height, width = x.shape[-2:]
    if is_any_size((height, width)):
        return x
    if height < sides[0] or width < sides[1]:
        x = F.pad(x, (0, max(0, sides[1] - width), 0, max(0, sides[0] - height)))
    # In bfloat16, torch 2.12 convolves a single window in channels-last memory wrongly on CPUs.
    return x.contiguous() if height < 2 * sides[0] and width < 2 * sides[1] else x


def adaptive_avg_pool(x: Tensor, sides: tuple[int, int]) -> Tensor:
    """Average the windows of ``adaptive_avg_pool2d``: (..., H, W) -> (..., *sides).

    An export for any size has them as matrices, since ONNX keeps the windows of one size.
    """
    if not is_any_size(x.shape[-2:]):
        return F.adaptive_avg_pool2d(x, sides)
    rows, columns = (
        _window_means(side, count, x) for side, count in zip(x.shape[-2:], sides, strict=True)
    )
    return rows @ x @ columns.mT


def _window_means(length: int, count: int, x: Tensor) -> Tensor:
    """Return the shares of places in the means of ``count`` windows: (count, length)."""
    window = torch.arange(count, device=x.device).unsqueeze(1)
    place = torch.arange(length, device=x.device)
    start, end = window * length // count, ((window + 1) * length + count - 1) // count
    return ((place >= start) & (place < end)).to(x.dtype) / (end - start).to(x.dtype)


def ceil_div(length: int, divisor: int) -> int:
    """Return how many runs of ``divisor`` cover a side.

    Without a negative number, whose quotient ONNX rounds towards zero.
    """
    return (length + divisor - 1) // divisor


def missing(length: int, divisor: int) -> int:
    """Return how much a side lacks to the next multiple of ``divisor``.

    Not as a remainder: the sizes that a graph has for symbols stay short if differences cancel.
    """
    return ceil_div(length, divisor) * divisor - length
