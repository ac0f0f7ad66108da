"""Bicubic resizing as MATLAB's imresize, which made the low-resolution images of all benchmarks.

The kernel (a = -0.5) is widened when shrinking, which antialiases; OpenCV's, Pillow's and scipy's
results differ. Borders are mirrored, with the last pixel twice.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def imresize(image: Array, factor: Fraction | float) -> Array:
    """Resize an image to ceil(factor * side) rows and columns.

    Args:
        image: (H, W) or (H, W, C), of uint8, uint16 or floats.
        factor: Above 1 enlarges, below 1 shrinks.

    Returns:
        The same type; integers are rounded and clipped once, at the end.
    """
    values = image.astype(np.float64)
    for axis in (0, 1):
        values = _resize_axis(values, axis, Fraction(factor))
    if not np.issubdtype(image.dtype, np.integer):
        return values.astype(image.dtype)
    most = np.iinfo(image.dtype).max
    return np.floor(values + 0.5).clip(0, most).astype(image.dtype)


def downscale(image: Array, scale: int) -> Array:
    """Shrink an image whose sides are multiples of ``scale``."""
    return imresize(image, Fraction(1, scale))


def crop_to_multiple(image: Array, scale: int) -> Array:
    """Crop an image at right and bottom to multiples of ``scale``."""
    height, width = (side // scale * scale for side in image.shape[:2])
    return image[:height, :width]


def _resize_axis(values: Array, axis: int, factor: Fraction) -> Array:
    places, weights = contributions(values.shape[axis], factor)
    shape = [1] * values.ndim
    shape[axis] = len(places)
    total = np.zeros((*values.shape[:axis], len(places), *values.shape[axis + 1 :]))
    for tap in range(places.shape[1]):
        total += weights[:, tap].reshape(shape) * np.take(values, places[:, tap], axis)
    return total


def contributions(length: int, factor: Fraction) -> tuple[Array, Array]:
    """Return the places (N, P) that each of N output pixels reads, and their weights (N, P)."""
    shrink = min(float(factor), 1.0)
    width = 4 / shrink
    # Centres of the output pixels in input pixels, counted from 0.
    centres = (np.arange(math.ceil(length * factor)) + 0.5) / float(factor) - 0.5
    first = np.floor(centres - width / 2)
    places = first[:, None] + np.arange(math.ceil(width) + 2)
    weights = shrink * cubic(shrink * (centres[:, None] - places))
    weights /= weights.sum(axis=1, keepdims=True)
    places = places.astype(np.int64) % (2 * length)
    places = np.minimum(places, 2 * length - 1 - places)
    used = (weights != 0).any(axis=0)
    return places[:, used], weights[:, used]


def cubic(x: Array) -> Array:
    """Return Keys' cubic kernel with a = -0.5.

    Source: Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981, Eq. 15.
    """
    x = np.abs(x)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, near, np.where(x <= 2, far, 0.0))
