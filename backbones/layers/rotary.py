"""Rotary positions in two dimensions: pairs of channels turn by a token's column or row.

Channels (2 p, 2 p + 1) are one complex number. With d channels and the d / 4 frequencies

    f_m = 10000^(-4 m / d),  m = 0, ..., d / 4 - 1,

pair p = 2 m turns by x f_m and pair p = 2 m + 1 by y f_m, so that the product of a query and a key
depends on their places through differences alone.

``rotate_by_axes`` has another order: the first half of the pairs turns by the row, the second half
by the column, as in MLLA and RALA. ``rotate_by_index`` turns all pairs by the token's index in
row-major order, as in RMT.

Source: Su et al., "RoFormer", 2021, Eq. 14 to 16 (one dimension); Chu et al., "VisionLLaMA: A
Unified LLaMA Backbone for Vision Tasks", ECCV 2024 (two, and their scale).

Axes: N tokens, d channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BASE = 10000.0


class Lattice(NamedTuple):
    """Token n is at column offset + step (n mod width) and row offset + step (n div width).

    Attributes:
        tokens: N; n = 0, ..., N - 1.
        width: Tokens after which a row is full.
        step: Distance of neighbours.
        offset: Column and row of token 0.
        unit: Divisor of columns and rows.
    """

    tokens: int
    width: int
    step: int = 1
    offset: float = 0.0
    unit: float = 1.0


def rotate(x: Tensor, lattice: Lattice) -> Tensor:
    """Turn queries or keys (B, N, heads, d) by the places of their tokens; d is a multiple of 4."""
    precise = torch.promote_types(x.dtype, torch.float32)
    return _turn(x, turning_angles(lattice, x.shape[-1], x.device, precise))


def rotate_by_axes(x: Tensor, inclusive: bool = False) -> Tensor:
    """Turn the first half of the channels by the row of their token and the second by its column.

    Args:
        x: (B, H, W, heads, d), d a multiple of 4.
        inclusive: The last of the d / 4 frequencies is 1 / 10000, and not the one before it.
    """
    count = x.shape[-1] // 4
    precise = torch.promote_types(x.dtype, torch.float32)
    periods = _periods(count, inclusive, x.device, precise)
    rows, columns = (
        torch.arange(side, device=x.device, dtype=precise)[:, None] / periods
        for side in x.shape[1:3]
    )
    shape = (*x.shape[1:3], count)
    angles = torch.cat([rows[:, None].expand(shape), columns.expand(shape)], dim=-1)
    return _turn(x, angles[:, :, None])


def rotate_by_index(*maps: Tensor) -> list[Tensor]:
    """Turn pairs of channels by the index of their token in row-major order, H W indices in all.

    The last of the d / 2 frequencies is 1 / 10000.

    Args:
        maps: (B, heads, H, W, d) each, of one size and type, d even.
    """
    x = maps[0]
    precise = torch.promote_types(x.dtype, torch.float32)
    periods = _periods(x.shape[-1] // 2, True, x.device, precise)
    rows, columns = (torch.arange(side, device=x.device, dtype=precise) for side in x.shape[2:4])
    angles = (rows[:, None] * x.shape[3] + columns)[..., None] / periods
    cosine, sine = angles.cos(), angles.sin()
    return [_turn_by(x, cosine, sine) for x in maps]


def _periods(count: int, inclusive: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return 10000^(m / count) for m = 0, ..., count - 1; ``inclusive`` ends at 10000."""
    powers = torch.arange(count, device=device, dtype=dtype)
    # Quotients, since counts of multiply-adds take products of tables for those of a network.
    return torch.pow(BASE, powers / max(count - 1 if inclusive else count, 1))


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels (..., d) by angles (..., d / 2), in float32 at least."""
    return _turn_by(x, angles.cos(), angles.sin())


def _turn_by(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    real, imaginary = x.to(cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = [real * cosine - imaginary * sine, real * sine + imaginary * cosine]
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


def turning_angles(
    lattice: Lattice, channels: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the angle by which each pair of channels turns, (N, 1, d / 2)."""
    index = torch.arange(lattice.tokens, device=device)
    rows = index // lattice.width
    # A quotient instead of a remainder by a symbol, which ONNX's converter lacks.
    places = torch.stack([index - rows * lattice.width, rows], dim=-1)
    places = (places * lattice.step).to(dtype) + lattice.offset
    # Quotients, since counts of multiply-adds take products of tables for those of a network.
    periods = torch.pow(BASE, torch.arange(0, channels, 4, device=device, dtype=dtype) / channels)
    return ((places / lattice.unit)[:, None, None] / periods[:, None]).flatten(2)
