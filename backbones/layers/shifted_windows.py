"""Windows that maps are padded to and Swin's masks of shifted ones, also in graphs for any size.

Source: Liu et al., "Swin Transformer", ICCV 2021, Sec. 3.2, Fig. 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import window_partition
from torch import Tensor

from backbones.layers.graph_sizes import is_any_size, missing

Size = tuple[int, int]


def shift_mask(
    size: Size, window: Size, shift: Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return (num_windows, h * w, h * w): -100 between tokens that the roll joined, else 0.

    Source: Swin Transformer, Sec. 3.2, Fig. 4 (cyclic shift); the value -100 is the authors'.
    """
    rows, columns = (
        _region(length, side, offset, device)
        for length, side, offset in zip(size, window, shift, strict=True)
    )
    return mask_of_regions(rows, columns, window, dtype)


def mask_of_regions(rows: Tensor, columns: Tensor, window: Size, dtype: torch.dtype) -> Tensor:
    """Return (num_windows, h * w, h * w): -100 between tokens of different regions, else 0."""
    regions = rows[:, None] * 4 + columns[None, :]
    windows = window_partition(regions[None, :, :, None], window).flatten(1)
    differ = windows[:, :, None] != windows[:, None, :]
    return torch.zeros(differ.shape, device=rows.device, dtype=dtype).masked_fill_(differ, -100.0)


def _region(length: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return the region of every position on an axis: bulk, last window's start, rolled-in end."""
    position = torch.arange(length, device=device)
    if not shift:
        return torch.zeros_like(position)
    return (position >= length - window).long() + (position >= length - shift).long()


class AnyLength:
    """Windows along an axis whose length is a symbol, by the same steps at every length.

    What depends on the length (the number of windows, whether they shift, whether the map is
    smaller than one) is computed as tensors, so a recorded graph holds for all lengths. A map
    shorter than the window is padded to one, and its padding is a region of its own.

    Args:
        length: Tokens along the axis.
        window: Side of a window.
        shift: By which a longer axis rolls; 0 in blocks that do not shift.
        shift_single_window: True to also roll an axis of exactly one window.
        device: Of the tensors.

    Attributes:
        padded: Length up to the next multiple of the window.
        regions: (padded) region of every position after the roll.
    """

    def __init__(
        self, length: int, window: int, shift: int, shift_single_window: bool, device: torch.device
    ) -> None:
        self.length = length
        size = torch.full((1,), length, device=device)
        # A symbol of its own: symbolic algebra on rounded quotients of quotients takes minutes.
        count: Any = ((size + window - 1) // window).item()
        torch._check(count >= 1)
        self.padded = count * window
        position = torch.arange(self.padded, device=device)
        shifts = (size >= window if shift_single_window else size > window).long()
        by = shifts * shift
        # Quotients instead of remainders by a symbol, which ONNX's converter lacks.
        source = position + by
        self.source = torch.where(source >= self.padded, source - self.padded, source)
        target = torch.arange(length, device=device) - by
        self.target = torch.where(target < 0, target + self.padded, target)
        moved = (position >= self.padded - window).long() + (position >= self.padded - by).long()
        outside = (position >= length) & (size < window)
        self.regions = torch.where(outside, 3, moved * shifts)

    def roll(self, x: Tensor, dim: int) -> Tensor:
        """Pad the axis ``dim`` with zeros and roll it."""
        shape = [1] * x.ndim
        shape[dim] = -1
        inside = self.source < self.length
        x = x.index_select(dim, torch.where(inside, self.source, 0))
        return x * inside.to(x.dtype).reshape(shape)

    def unroll(self, x: Tensor, dim: int) -> Tensor:
        """Undo ``roll``."""
        return x.index_select(dim, self.target)


def pad_to_windows(x: Tensor, window: Size) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Pad a map (B, H, W, C) with zeros to whole windows; also return a function that crops it."""
    height, width = x.shape[1:3]
    if is_any_size((height, width)):
        rows, columns = (
            AnyLength(length, side, 0, False, x.device)
            for length, side in zip((height, width), window, strict=True)
        )
        x = columns.roll(rows.roll(x, 1), 2)
        return x, lambda x: columns.unroll(rows.unroll(x, 1), 2)
    bottom, right = missing(height, window[0]), missing(width, window[1])
    if bottom or right:
        x = F.pad(x, (0, 0, 0, right, 0, bottom))
    return x, lambda x: x[:, :height, :width]
