"""The only place that moves axes between a host's layout and the mixers' (B, H, W, C).

A host's own modules (timm's) keep the host's layout; a ``Mixer`` in their place gets its map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backbones.base import Mixer, PointwiseMixer


def mix_tokens(
    mixer: nn.Module, tokens: Tensor, grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Apply a mixer to tokens (B, P + H * W, C): prefix tokens, then the map in row-major order."""
    if isinstance(mixer, PointwiseMixer) or not isinstance(mixer, Mixer):
        return mixer(tokens)
    prefix, patches = tokens[:, :num_prefix_tokens], tokens[:, num_prefix_tokens:]
    x = patches.unflatten(1, grid)
    if not num_prefix_tokens:
        return mixer(x).flatten(1, 2)
    x, prefix = mixer(x, prefix)
    return torch.cat([prefix, x.flatten(1, 2)], dim=1)


def mix_nchw(mixer: nn.Module, x: Tensor) -> Tensor:
    """Apply a mixer to a map (B, C, H, W); copies nothing if the map is in channels_last memory."""
    if not isinstance(mixer, Mixer):
        return mixer(x)
    return to_nchw(mixer(to_nhwc(x)))


def to_nhwc(x: Tensor) -> Tensor:
    """View (B, C, H, W) as (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def to_nchw(x: Tensor) -> Tensor:
    """View (B, H, W, C) as (B, C, H, W); a contiguous input comes out in channels_last memory."""
    return x.permute(0, 3, 1, 2)


def is_any_size(size: Sequence[int]) -> bool:
    """Whether a graph is exported in which a size is a symbol, so that it has to serve any.

    Compilers may guard on a comparison of sizes and record again; an exported graph would keep the
    answer for ever.
    """
    return any(isinstance(side, torch.SymInt) for side in size) and torch.compiler.is_exporting()


def same_size(size: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two sizes are equal, so that nothing need be resampled; any size is never equal."""
    return not is_any_size(size) and tuple(size) == tuple(other)


def crop(x: Tensor, height: int, width: int, rows: int = 2) -> Tensor:
    """The upper left part of a map, (B, C, H, W) -> (B, C, height, width); NHWC with ``rows=1``."""
    return leading(leading(x, rows, height), rows + 1, width)


def leading(x: Tensor, axis: int, length: int) -> Tensor:
    """The first ``length`` places of an axis, a view where one size is recorded or none."""
    if is_any_size((length,)):
        # A graph would compare a view's strides with memory formats and keep the answer for ever.
        return x.index_select(axis, torch.arange(length, device=x.device))
    return x.narrow(axis, 0, length)


def ceil_div(length: int, divisor: int) -> int:
    """How many runs of ``divisor`` cover a side.

    Without a negative number, whose quotient ONNX rounds towards zero.
    """
    return (length + divisor - 1) // divisor


def missing(length: int, divisor: int) -> int:
    """What a side lacks to the next multiple of ``divisor``.

    Not as a remainder: the sizes that a graph has for symbols stay short if differences cancel.
    """
    return ceil_div(length, divisor) * divisor - length
