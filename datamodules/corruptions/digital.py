"""Corruptions by cameras, screens and files. Pixels are (S, S, 3), from 0 to 1."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Pixels = NDArray[np.float64]
UNIT = 244  # pixels; elastic_transform's parameters are shares of it


def brightness(pixels: Pixels, more: float, rng: np.random.Generator) -> Pixels:
    """Raise the value of HSV, the largest channel; hue and saturation stay.

    Args:
        pixels: The image.
        more: Increase of the value, up to 1.
        rng: Unused, as the result is deterministic.
    """
    value = pixels.max(-1, keepdims=True)
    raised = np.clip(value + more, 0, 1)
    black = value == 0
    # Hue and saturation of black are 0, so it turns grey.
    return np.where(black, raised, pixels * raised / np.where(black, 1, value))


def contrast(pixels: Pixels, factor: float, rng: np.random.Generator) -> Pixels:
    """Shrink the differences to each channel's mean; the result is deterministic."""
    mean = pixels.mean((0, 1))
    return (pixels - mean) * factor + mean


def elastic(pixels: Pixels, shares: tuple[float, float, float], rng: np.random.Generator) -> Pixels:
    """Apply a random affine map, then smooth random shifts of all pixels.

    Args:
        pixels: The image.
        shares: Size of the shifts, standard deviation of their smoothing and range of the affine
            map, as shares of ``UNIT`` pixels.
        rng: Source of both.
    """
    size, sigma, reach = (UNIT * share for share in shares)
    side = len(pixels)
    y, x = np.mgrid[:side, :side].astype(np.float64)
    middle, third = side // 2, side // 3
    corners = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + rng.uniform(-reach, reach, corners.shape)
    # Three points determine the map from (x, y, 1) of the result to (x, y) of the image.
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)
    at_x, at_y = (back[0, i] * x + back[1, i] * y + back[2, i] for i in (0, 1))
    mapped = _sampled(pixels, at_y, at_x, "mirror")
    shift_x, shift_y = (
        size
        * ndimage.gaussian_filter(
            rng.uniform(-1, 1, (side, side)), sigma, mode="reflect", truncate=3
        )
        for _ in range(2)
    )
    return _sampled(mapped, y + shift_y, x + shift_x, "reflect")


def pixelate(pixels: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    """Shrink the image to this share of its side and enlarge it by boxes; deterministic."""
    image = _image(pixels)
    small = max(1, int(image.width * share))
    box = Image.Resampling.BOX
    return _values(image.resize((small, small), box).resize(image.size, box))


def jpeg(pixels: Pixels, quality: int, rng: np.random.Generator) -> Pixels:
    """Save and open the image as a JPEG of this quality; the result is deterministic."""
    file = io.BytesIO()
    _image(pixels).save(file, "JPEG", quality=quality)
    return _values(Image.open(file))


def _sampled(pixels: Pixels, y: Pixels, x: Pixels, mode: str) -> Pixels:
    return np.stack(
        [ndimage.map_coordinates(pixels[..., i], (y, x), order=1, mode=mode) for i in range(3)],
        axis=-1,
    )


def _image(pixels: Pixels) -> Image.Image:
    return Image.fromarray(np.round(pixels * 255).astype(np.uint8))


def _values(image: Image.Image) -> Pixels:
    # Add half a step, so that truncating restores the exact values.
    return (np.asarray(image.convert("RGB")) + 0.5) / 255.5
