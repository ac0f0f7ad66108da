"""Mix the tokens of a map within square windows, at any map size, shifted or not.

An axis of L tokens is cut into n = ceil(L / w) windows of w tokens, padded at its end and then, if
shifted, rolled by w // 2, so that its first tokens come last (Swin's order). An axis that is not
longer than the window is one window of its own length and is never shifted. All windows with the
same pattern of tokens and padding are one matrix product, so a map of any size takes at most nine,
most of them for a single row or column of windows.

Source: Swin Transformer (ICCV 2021), Sec. 3.2; PosMLP (MM 2022), Sec. 4.2 and 5.5. PosMLP does not
say what happens to maps that the window does not divide: here padding is never read.

Axes: B images, s groups of channels, n * m windows of e * f tokens each, C channels; channel c is
of group c mod s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.graph_sizes import ceil_div


class Pattern(NamedTuple):
    """Content of one axis of a window: ``tail`` tokens, then padding, then ``head`` tokens.

    The head is the map's beginning, rolled in from the other side. It and the tail do not see each
    other, and padding is never seen.
    """

    size: int
    tail: int
    head: int = 0


Matrix = Callable[[Pattern, Pattern], Tensor]
Function = Callable[[Tensor, Pattern, Pattern], Tensor]
Products = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def cut(length: int, window: int, shifted: bool) -> tuple[list[tuple[int, Pattern]], int]:
    """Cut an axis into windows; return runs (number of windows, pattern) and the roll."""
    length = int(length)
    if length <= window:
        return [(1, Pattern(length, length))], 0
    shift = window // 2 if shifted else 0
    count = ceil_div(length, window)
    runs: list[tuple[int, Pattern]] = []
    for index in range(count):
        tail = min(window, max(0, length - shift - index * window))
        pattern = Pattern(window, tail, shift if index == count - 1 else 0)
        if runs and runs[-1][1] == pattern:
            runs[-1] = (runs[-1][0] + 1, pattern)
        else:
            runs.append((1, pattern))
    return runs, shift


def visible(rows: Pattern, columns: Pattern, device: torch.device) -> Tensor | None:
    """Return which tokens a token may see, (e * f, e * f) booleans; None if it may see all.

    Padding sees itself, so that no row of a softmax is empty.
    """
    if rows.tail == rows.size and columns.tail == columns.size:
        return None
    down, across = (_labels(pattern, device) for pattern in (rows, columns))
    labels = (3 * down[:, None] + across).flatten()
    return labels[:, None] == labels


def map_windows(x: Tensor, window: int, shifted: bool, function: Function) -> Tensor:
    """Apply a function to the windows of a map, all those of the same patterns at once.

    Args:
        x: (B, H, W, C).
        window: Side w.
        shifted: True to start windows half a window after the map's corner.
        function: From windows (B, n, e, m, f, C) and the patterns of both axes to the same shape.

    Returns:
        (B, H, W, C).
    """
    height, width = x.shape[1:3]
    (rows, down), (columns, right) = (cut(side, window, shifted) for side in (height, width))
    padded_height, padded_width = (
        sum(count * pattern.size for count, pattern in runs) for runs in (rows, columns)
    )
    if (padded_height, padded_width) != (height, width):
        x = F.pad(x, (0, 0, 0, padded_width - width, 0, padded_height - height))
    if down or right:
        x = x.roll((-down, -right), dims=(1, 2))
    x = x.unflatten(1, (-1, rows[0][1].size)).unflatten(3, (-1, columns[0][1].size))
    bands = []
    for band, (_, row) in zip(x.split([count for count, _ in rows], dim=1), rows, strict=True):
        parts = band.split([count for count, _ in columns], dim=3)
        mixed = [
            function(part, row, column) for part, (_, column) in zip(parts, columns, strict=True)
        ]
        bands.append(mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=3))
    x = (bands[0] if len(bands) == 1 else torch.cat(bands, dim=1)).flatten(3, 4).flatten(1, 2)
    if down or right:
        x = x.roll((down, right), dims=(1, 2))
    return x[:, :height, :width]


def batched_products(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Return W_g x_g + b: (G, M, K), (G, K, N) and per row (M, 1) -> (G, M, N)."""
    if bias is None:
        return torch.bmm(left, right)
    return torch.baddbmm(bias.to(left.dtype), left, right)


def mix_windows(
    x: Tensor, window: int, shifted: bool, groups: int, matrix: Matrix, bias: Tensor | None,
    *, contiguous: bool = False, products: Products = batched_products,
) -> Tensor:  # fmt: skip
    """Apply matrix(...) x + bias to the tokens of every window.

    Args:
        x: (B, H, W, C).
        window: Side w.
        shifted: True to start windows half a window after the map's corner.
        groups: s, a divisor of C.
        matrix: From the patterns of both axes to (s, e * f, e * f), rows the tokens written.
        bias: (w * w) or None.
        contiguous: True for groups of adjacent channels; else channel c is in group c mod s.
        products: Multiplies the matrices of all groups.

    Returns:
        (B, H, W, C).
    """

    def mix(part: Tensor, row: Pattern, column: Pattern) -> Tensor:
        rows, corner = _rows_by_group(part, groups, contiguous), _corner(bias, window, row, column)
        mixed = products(matrix(row, column), rows, corner)
        return _from_groups(mixed, part.shape, groups, contiguous)

    return map_windows(x, window, shifted, mix)


def spans(pattern: Pattern) -> list[slice]:
    """Return the places of a window whose tokens see each other, along one axis."""
    tail, head = slice(0, pattern.tail), slice(pattern.size - pattern.head, pattern.size)
    return [span for span in (tail, head) if span.start < span.stop]


def corner_of_matrix(weight: Tensor, window: int, rows: Pattern, columns: Pattern) -> Tensor:
    """Cut a weight (w * w, w * w) down to smaller windows (e * f, e * f); positions keep theirs."""
    e, f = rows.size, columns.size
    if e == f == window:
        return weight
    weight = weight.reshape(window, window, window, window)
    return weight[:e, :f, :e, :f].reshape(e * f, e * f)


def _corner(bias: Tensor | None, window: int, rows: Pattern, columns: Pattern) -> Tensor | None:
    """Return the bias of smaller windows, by position: (w * w) -> (e * f, 1)."""
    if bias is None:
        return None
    return bias.reshape(window, window)[: rows.size, : columns.size].reshape(-1, 1)


def _rows_by_group(x: Tensor, groups: int, contiguous: bool) -> Tensor:
    """Order windows by group: (B, n, e, m, f, C) -> (s, e * f, ...), a row per place."""
    b, n, e, m, f, c = x.shape
    if contiguous:
        x = x.reshape(b, n, e, m, f, groups, c // groups).permute(5, 2, 4, 0, 1, 3, 6)
    else:
        x = x.reshape(b, n, e, m, f, c // groups, groups).permute(6, 2, 4, 0, 1, 3, 5)
    # One copy of all groups; a product of strided ones copies each by itself, value by value.
    return x.reshape(groups, e * f, -1).contiguous()


def _from_groups(mixed: Tensor, shape: torch.Size, groups: int, contiguous: bool) -> Tensor:
    """Undo ``_rows_by_group``."""
    b, n, e, m, f, c = shape
    mixed = mixed.reshape(groups, e, f, b, n, m, c // groups)
    order = (3, 4, 1, 5, 2, 0, 6) if contiguous else (3, 4, 1, 5, 2, 6, 0)
    return mixed.permute(order).reshape(b, n, e, m, f, c)


def _labels(pattern: Pattern, device: torch.device) -> Tensor:
    """Return (size) integers: 0 tail, 1 head, 2 padding."""
    position = torch.arange(pattern.size, device=device)
    head = (position >= pattern.size - pattern.head).long()
    return torch.where(position < pattern.tail, 0, 2 - head)
