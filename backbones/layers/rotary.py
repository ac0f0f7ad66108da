"""Rotary positions in two dimensions: pairs of channels turn by a token's column or row.

Channels (2 p, 2 p + 1) are one complex number. With d channels and the d / 4 frequencies

    f_m = 10000^(-4 m / d),  m = 0, ..., d / 4 - 1,

pair p = 2 m turns by x f_m and pair p = 2 m + 1 by y f_m, so that the product of a query and a key
depends on their places through differences alone.

Source: Su et al., "RoFormer", 2021, Eq. 14 to 16 (one dimension); Chu et al., "VisionLLaMA: A
Unified LLaMA Backbone for Vision Tasks", ECCV 2024 (two, and their scale).

Axes: N tokens, d channels of a head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from backbones.layers.eval_cache import in_graph

BASE = 10000.0
# A network asks for two lattices a stage and the window's; a few sizes of images stay in memory.
MAX_TABLES = 24


class Lattice(NamedTuple):
    """Token n is at column offset + step (n mod width) and row offset + step (n div width).

    Attributes:
        tokens: N; n = 0, ..., N - 1.
        width: Tokens after which a row is full.
        step: Distance of neighbours.
        offset: Column and row of token 0.
        unit: What columns and rows are divided by.
    """

    tokens: int
    width: int
    step: int = 1
    offset: float = 0.0
    unit: float = 1.0


def rotate(x: Tensor, lattice: Lattice) -> Tensor:
    """Turn queries or keys (B, N, heads, d) by the places of their tokens; d is a multiple of 4."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    make = _table if in_graph() else _cached_table
    cosine, sine = make(lattice, x.shape[-1], x.device, dtype)
    # (a + i b) e^(i t) = (a cos t - b sin t) + i (b cos t + a sin t); the table holds the signs.
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cosine + swapped * sine).to(x.dtype)


@functools.lru_cache(maxsize=MAX_TABLES)
def _cached_table(
    lattice: Lattice, channels: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # A tensor made under inference_mode could not serve a later training step from the cache.
    with torch.inference_mode(mode=False), torch.no_grad():
        return _table(lattice, channels, device, dtype)


def _table(
    lattice: Lattice, channels: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the signs of the swapped channels, both (N, 1, d)."""
    index = torch.arange(lattice.tokens, device=device)
    columns, rows = index % lattice.width, index // lattice.width
    places = torch.stack([columns, rows], -1).to(dtype) * lattice.step + lattice.offset
    exponents = torch.arange(0, channels, 4, device=device, dtype=dtype) / channels
    # Quotients, since counts of multiply-adds take products of tables for those of a network.
    periods = torch.pow(BASE, exponents)[:, None]
    angles = (places / lattice.unit)[:, None, :] / periods  # (N, d / 4, 2): x f_m, y f_m
    angles = angles.flatten(1).repeat_interleave(2, dim=1)[:, None]
    signs = torch.tensor([-1.0, 1.0], device=device, dtype=dtype)
    return angles.cos(), (angles.sin().unflatten(-1, (-1, 2)) / signs).flatten(-2)
