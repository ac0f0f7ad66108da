"""Bicubic enlargement as MATLAB's imresize: a = -0.5, pixel centres aligned, mirrored borders.

torch's ``mode="bicubic"`` has a = -0.75. With ``antialias`` it has a = -0.5, and cuts borders off
instead of mirroring them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 2  # pixels that the kernel reaches beyond a border


def enlarge(images: Tensor, scale: int) -> Tensor:
    """Enlarge images by a whole factor: (B, C, H, W) -> (B, C, r H, r W)."""
    for axis in (2, 3):
        images = mirror(images, axis, MARGIN, MARGIN)
    height, width = images.shape[2:]
    enlarged = F.interpolate(
        images, (scale * height, scale * width), mode="bicubic", antialias=True, align_corners=False
    )
    cut = scale * MARGIN
    return enlarged[:, :, cut:-cut, cut:-cut]


def mirror(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Continue an axis at both ends with its mirror image, in which the last entry comes twice."""
    length = x.shape[axis]
    place = _modulo(torch.arange(-before, length + after, device=x.device), 2 * length)
    return x.index_select(axis, torch.minimum(place, 2 * length - 1 - place))


def reflect(x: Tensor, axis: int, after: int) -> Tensor:
    """Continue an axis at its end with its mirror image, in which the last entry comes once."""
    length = x.shape[axis]
    if length == 1:
        return x.expand(*x.shape[:axis], 1 + after, *x.shape[axis + 1 :])
    place = _modulo(torch.arange(length + after, device=x.device), 2 * (length - 1))
    return x.index_select(axis, torch.minimum(place, 2 * (length - 1) - place))


def _modulo(places: Tensor, period: int) -> Tensor:
    # By a quotient: ONNX's converter lacks remainders by a symbol.
    return places - places.div(period, rounding_mode="floor").long() * period
