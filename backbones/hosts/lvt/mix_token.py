"""MixToken: exchange of a box of a map between two images, undone after the blocks.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.10858; Yun et al., "CutMix", ICCV 2019,
https://arxiv.org/abs/1905.04899 (for the box).

Axes: B images, H W map, N tokens, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """Rows and columns of a map: first, and one past the last."""

    top: int
    bottom: int
    left: int
    right: int


class Tokens(NamedTuple):
    """Input of the classifier.

    Attributes:
        tokens: (B, 1 + N, C), the class token first, all others in their own image.
        own_share: Share of the map from a class token's own image; the rest is from the image in
            the mirrored place of the batch.
    """

    tokens: Tensor
    own_share: float = 1.0


def draw_box(size: tuple[int, int]) -> Box:
    """Draw CutMix's random box in a map of (H, W), cropped at the map's borders.

    Its area before cropping is uniform, its sides are rounded down to even numbers.
    """
    area, *centre = torch.rand(3).tolist()
    sides = []
    for length, place in zip(size, centre, strict=True):
        half = int(length * area**0.5) // 2
        middle = int(length * place)
        sides += [max(middle - half, 0), min(middle + half, length)]
    return Box(*sides)


def swap(x: Tensor, box: Box, unit: int = 1) -> Tensor:
    """Exchange a box of (B, H, W, C) with the image in the mirrored place of the batch.

    Args:
        x: (B, H, W, C).
        box: Box in units.
        unit: Positions per unit.
    """
    rows = slice(unit * box.top, unit * box.bottom)
    columns = slice(unit * box.left, unit * box.right)
    mixed = x.clone()
    mixed[:, rows, columns] = x[:, rows, columns].flip(0)
    return mixed


def own_share(box: Box, size: tuple[int, int]) -> float:
    """Return the share of a map of (H, W) outside a box."""
    return 1 - (box.bottom - box.top) * (box.right - box.left) / (size[0] * size[1])
