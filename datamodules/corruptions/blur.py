"""Blur from lens, glass, motion and zoom. Pixels are (S, S, 3), from 0 to 1."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Pixels = NDArray[np.float64]
SMALLEST = 8  # smallest half side of a defocus kernel


def defocus(pixels: Pixels, lens: tuple[int, float], rng: np.random.Generator) -> Pixels:
    """Average over a disk.

    Args:
        pixels: The image.
        lens: Radius of the disk, and standard deviation of its softened edge.
        rng: Unused, as the result is deterministic.
    """
    kernel = disk(*lens)
    # OpenCV's default border, which skips the outermost pixel.
    return np.stack(
        [ndimage.correlate(pixels[..., i], kernel, mode="mirror") for i in range(3)], axis=-1
    )


def disk(radius: int, sigma: float) -> Pixels:
    """Return a disk of sum 1 with its edge softened over 3 pixels (5 in large disks)."""
    half = max(radius, SMALLEST)
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    inside = (x**2 + y**2 <= radius**2).astype(np.float64)
    reach = 1 if radius <= SMALLEST else 2
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    kernel = inside / inside.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, weights, axis=axis, mode="mirror")
    return kernel


def glass(pixels: Pixels, pane: tuple[float, int, int], rng: np.random.Generator) -> Pixels:
    """Blur, replace pixels by near ones, row by row from the far corner, and blur again.

    The authors' swap of two pixels copies one onto the other, as both are views of one array. The
    published files have this effect, so it is kept.

    Args:
        pixels: The image.
        pane: Standard deviation of the blur, largest shift in pixels, and number of passes.
        rng: Source of the shifts.
    """
    sigma, reach, times = pane
    side = len(pixels)
    blurred = np.floor(_gaussian(pixels, sigma) * 255).astype(np.int64).reshape(-1, 3)
    places = np.arange(side - reach, reach, -1)
    rows, columns = (part.reshape(-1) for part in np.meshgrid(places, places, indexing="ij"))
    targets = rows * side + columns
    order = list(range(side * side))
    for _ in range(times):
        dx, dy = rng.integers(-reach, reach, (2, len(targets)))
        sources = (rows + dy) * side + columns + dx
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            order[target] = order[source]
    return _gaussian(blurred[order].reshape(side, side, 3) / 255, sigma)


def motion(pixels: Pixels, camera: tuple[int, float], rng: np.random.Generator) -> Pixels:
    """Average along a line of random direction, at most 45 degrees from the horizontal.

    Args:
        pixels: The image.
        camera: Radius and standard deviation; see ``average_along``.
        rng: Source of the direction.
    """
    return average_along(pixels, *camera, angle=rng.uniform(-45, 45))


def average_along(pixels: Pixels, radius: int, sigma: float, angle: float) -> Pixels:
    """Average over 2 * radius + 1 pixels in one direction, as ImageMagick does.

    Args:
        pixels: (S, S) or (S, S, 3).
        radius: Half the length of the line.
        sigma: Standard deviation of the weights, which decrease along the line.
        angle: Degrees from the horizontal, clockwise.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    radians = math.radians(angle)
    right = np.ceil(steps * math.cos(radians) - 0.5).astype(int)
    down = np.ceil(steps * math.sin(radians) - 0.5).astype(int)
    margin, side = 2 * radius + 1, len(pixels)
    widths = [(margin, margin)] * 2 + [(0, 0)] * (pixels.ndim - 2)
    padded = np.pad(pixels, widths, mode="edge")
    total = np.zeros_like(pixels)
    for weight, x, y in zip(weights, right, down, strict=True):
        rows, columns = (slice(margin + shift, margin + shift + side) for shift in (y, x))
        total += weight * padded[rows, columns]
    return total


def zoom(pixels: Pixels, zooms: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """Return the mean of the image and its enlargements.

    Args:
        pixels: The image.
        zooms: Exclusive end of the factors, and their step from 1 on.
        rng: Unused, as the result is deterministic.
    """
    end, step = zooms
    factors = np.arange(1, end, step)
    total = pixels.copy()
    for factor in factors.tolist():
        total += enlarge(pixels, factor)
    return total / (len(factors) + 1)


def enlarge(pixels: Pixels, factor: float) -> Pixels:
    """Enlarge the centre of an image (S, S) or (S, S, 3) to its size by linear interpolation."""
    side = len(pixels)
    part = math.ceil(side / factor)
    first = (side - part) // 2
    middle = pixels[first : first + part, first : first + part]
    large = ndimage.zoom(middle, [factor, factor, 1][: pixels.ndim], order=1)
    cut = (len(large) - side) // 2
    return large[cut : cut + side, cut : cut + side]


def _gaussian(pixels: Pixels, sigma: float) -> Pixels:
    return ndimage.gaussian_filter(pixels, (sigma, sigma, 0), mode="nearest")
