"""Parameters that belong to a map of one size, brought to another size by interpolation.

Axes are written as words, such as "H W C" for a table of places or "H F C 2" for the filter of a
half spectrum:

    H, W   rows and columns of the map
    F      columns of a half spectrum, W // 2 + 1
    N      tokens in row-major order, H * W
    R      offsets of two tokens in row-major order, (2 H - 1) * (2 W - 1)

Any other word is an axis that keeps its size. A small letter marks places that are summed over, as
in the matrix "N n" over tokens: its values shrink as the number of places grows, so that the sum
keeps its size.

Tables are resampled as timm resamples position tables, bicubic with antialiasing; spectra, which
have an axis F, bicubic with corners aligned, as GFNet's authors do.

Source: timm's resample_abs_pos_embed; Rao et al., GFNet, NeurIPS 2021,
https://arxiv.org/abs/2107.00645, the authors' code for fine-tuning at another size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.graph_sizes import same_size

Grid = tuple[int, int]


def sides(word: str, grid: Grid) -> tuple[int, ...]:
    """Return the sizes that make up an axis at a map size; () for an axis that keeps its size."""
    height, width = grid
    return {
        "H": (height,),
        "W": (width,),
        "F": (width // 2 + 1,),
        "N": (height, width),
        "R": (2 * height - 1, 2 * width - 1),
    }.get(word.upper(), ())


def fits(shape: Sequence[int], axes: str, grid: Grid) -> bool:
    """Return True if a table of this shape belongs to a map of this size."""
    words = axes.split()
    return len(shape) == len(words) and all(
        size == math.prod(sides(word, grid) or (size,))
        for size, word in zip(shape, words, strict=True)
    )


def grid_of(shape: Sequence[int], axes: str, guess: Grid | None = None) -> Grid:
    """Find a map size that a table belongs to: the likely one, else a square, else any.

    Raises:
        ValueError: Every size differs from the table's.
    """
    for grid in [*([guess] if guess else ()), *_candidates([shape])]:
        if fits(shape, axes, grid) and (grid == guess or _is_known(grid, [axes])):
            return grid
    raise ValueError(
        f"a table of shape {tuple(shape)} does not fit the axes {axes!r}; correct grid_axes"
    )


def resize_table(table: Tensor, axes: str, source: Grid, target: Grid) -> Tensor:
    """Bring a table from one map size to another.

    Args:
        table: Of the map size ``source``.
        axes: One word per axis, see above.
        source: (H, W) that it belongs to.
        target: (H, W) that it is brought to.
    """
    if same_size(target, source):
        return table
    words = axes.split()
    precise = table if table.dtype == torch.float64 else table.float()
    for axis in reversed(range(len(words))):
        before = sides(words[axis], source)
        if len(before) > 1:
            precise = precise.unflatten(axis, before)
        if before and words[axis].islower():
            precise = precise * (math.prod(before) / math.prod(sides(words[axis], target)))
    sizes = [size for word in words for size in sides(word, target) or (0,)]
    targets = [(axis, size) for axis, size in enumerate(sizes) if size]
    for index in range(0, len(targets), 2):
        precise = _interpolate(precise, targets[index : index + 2], "F" in axes.upper().split())
    for axis, word in enumerate(words):
        if len(sides(word, target)) > 1:
            precise = precise.flatten(axis, axis + 1)
    return precise.to(table.dtype).contiguous()


def _interpolate(x: Tensor, targets: Sequence[tuple[int, int]], is_spectrum: bool) -> Tensor:
    """Resample one or two axes, given with their new sizes."""
    axes = [axis for axis, _ in targets]
    last = list(range(x.ndim - len(axes), x.ndim))
    picture = x.movedim(axes, last)
    other_sizes = picture.shape[: x.ndim - len(axes)]
    size = [size for _, size in targets]
    if len(axes) == 1:
        picture, size = picture.unsqueeze(-2), [1, *size]
    flat = picture.reshape(1, -1, *picture.shape[-2:])
    # Columns as rows: torch fills a column with antialias with copies of its first value.
    is_column = type(size[1]) is int and size[1] == 1  # a symbol of a graph is another type
    kind = {"align_corners": True} if is_spectrum else {"antialias": True}
    if is_column:
        resized = F.interpolate(flat.mT, size[::-1], mode="bicubic", **kind).mT
    else:
        resized = F.interpolate(flat, size, mode="bicubic", **kind)
    resized = resized.reshape(*other_sizes, *size[-len(axes) :])
    return resized.movedim(last, axes)


def common_source(
    shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    grid: Grid,
    declared: Mapping[str, str],
    reads: Collection[str] = (),
    stated: Grid | None = None,
) -> tuple[Grid, dict[str, str]] | None:
    """Find the one map size that explains all tables whose shapes differ, and their axes.

    Axes of a table that declares none are those whose sizes differ, by what they are at both map
    sizes. Without a statement square maps are tried first.

    Args:
        shapes: Of each table, its shape here and in the file.
        grid: Map size here.
        declared: Axes of tables that say so.
        reads: Weights of layers, which sum over their second axis.
        stated: Map size of the file, where it is known.

    Returns:
        The map size and the axes by table, or None.
    """
    for source in (
        [stated] if stated else _candidates([file_shape for _, file_shape in shapes.values()])
    ):
        axes = {
            name: declared.get(name)
            or _axes_between(shape, file_shape, grid, source, name in reads)
            for name, (shape, file_shape) in shapes.items()
        }
        axes_of_name = {name: words for name, words in axes.items() if words is not None}
        if (
            len(axes_of_name) == len(shapes)
            and all(
                fits(shape, axes_of_name[name], grid)
                and fits(file_shape, axes_of_name[name], source)
                for name, (shape, file_shape) in shapes.items()
            )
            and (stated or _is_known(source, axes_of_name.values()))
        ):
            return source, axes_of_name
    return None


def _is_known(grid: Grid, tables: Iterable[str]) -> bool:
    """Return True unless a number of tokens may be that of several oblong maps."""
    words = {word.upper() for axes in tables for word in axes.split()}
    return grid[0] == grid[1] or not words & {"N", "R"} or {"H", "W"} <= words


def _axes_between(
    table_shape: Sequence[int], second_shape: Sequence[int], grid: Grid, source: Grid, reads: bool
) -> str | None:
    """Return the axes of an undeclared table; a second one of a kind is summed over."""
    if len(table_shape) != len(second_shape):
        return None
    words: list[str] = []
    for axis, (size, file_size) in enumerate(zip(table_shape, second_shape, strict=True)):
        if size == file_size:
            words.append(f"axis{axis}")
            continue
        letters = [
            letter
            for letter in "HWFNR"
            if math.prod(sides(letter, grid)) == size
            and math.prod(sides(letter, source)) == file_size
        ]
        if not letters:
            return None
        unused = [letter for letter in letters if letter not in words]
        word = unused[0] if unused else letters[0].lower()
        words.append(word.lower() if reads and axis == 1 else word)
    return " ".join(words)


def _candidates(shapes: Sequence[Sequence[int]]) -> Iterator[Grid]:
    """Map sizes that tables of these shapes may belong to, square ones first."""
    numbers = {size for shape in shapes for size in shape}
    sides = set(numbers)
    for size in numbers:
        sides |= {math.isqrt(size), (math.isqrt(size) + 1) // 2, 2 * size - 2, 2 * size - 1}
    lengths = sorted(length for length in sides if length > 0)
    yield from ((side, side) for side in lengths)
    yield from itertools.permutations(lengths, 2)
