"""The fast form of ``rotary.rotate``: products of complex numbers, whose turns are kept.

Axes: N tokens, d channels of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from backbones.layers.eager import in_graph, is_watched
from backbones.layers.rotary import Lattice, as_pairs, turning_angles
from backbones.layers.rotary import rotate as rotate_plainly

# A network asks for two lattices a stage and the window's; a few sizes of images stay in memory.
MAX_TABLES = 24


def rotate(x: Tensor, lattice: Lattice) -> Tensor:
    """Turn queries or keys (B, N, heads, d) by the places of their tokens; d is a multiple of 4."""
    # Compilers make no code for complex numbers, and counts are those of the formula.
    if in_graph() or is_watched():
        return rotate_plainly(x, lattice)
    pairs = as_pairs(x)
    turns = cached_turns(lattice, x.shape[-1], x.device, pairs.dtype)
    return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2).to(x.dtype)


@functools.lru_cache(maxsize=MAX_TABLES)
def cached_turns(
    lattice: Lattice, channels: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Complex numbers of size 1, (N, 1, d / 2)."""
    # A tensor made under inference_mode could not serve a later training step from the cache.
    with torch.inference_mode(mode=False), torch.no_grad():
        angles = turning_angles(lattice, channels, device, dtype)
        return torch.polar(torch.ones_like(angles), angles)
