"""Views of a map with its channels second or last."""

from __future__ import annotations

from torch import Tensor


def to_nhwc(x: Tensor) -> Tensor:
    """View (B, C, H, W) as (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def to_nchw(x: Tensor) -> Tensor:
    """View (B, H, W, C) as (B, C, H, W); a contiguous input comes out in channels_last memory."""
    return x.permute(0, 3, 1, 2)
