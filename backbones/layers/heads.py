"""Heads of attentions: their number by default, and how channels are cut into them."""

from __future__ import annotations

from torch import Tensor

from backbones.layers.bounds import check_divisor


def usual_heads(dim: int, num_heads: int | None, head_dim: int = 32) -> int:
    """Return the number of heads: the given one, or as many as leave each ``head_dim`` or more.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """
    if num_heads is None:
        return max(h for h in range(1, max(1, dim // head_dim) + 1) if dim % h == 0)
    check_divisor("num_heads", num_heads, dim)
    return num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut the channels into heads: (..., N, C) -> (..., h, N, C / h)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """Put the heads side by side: (..., h, N, d) -> (..., N, h d)."""
    return x.transpose(-3, -2).flatten(-2)
