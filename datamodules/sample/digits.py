"""Material of the sample data: scikit-learn's handwritten digits and photographs.

Each digit image and photo column belongs to either training or validation, in all sample datasets.
So a network trained on one dataset has seen no validation digit of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SampleSplit = Literal["train", "val"]
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

NUM_TRAIN_DIGITS = 1400  # of 1,797
SPLIT_SEED = 20_260  # fixed, so the split is the same for any seed of the user
PHOTO_COLUMNS = {"train": slice(0, 440), "val": slice(456, 640)}  # of photos 640 pixels wide
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class Material:
    """Material of the images of one split.

    Attributes:
        digits: (N, 8, 8) grey values from 0 (paper) to 255 (ink).
        labels: (N,) digits from 0 to 9.
        photos: RGB photographs.
    """

    digits: Pixels
    labels: NDArray[np.int64]
    photos: tuple[Image.Image, ...]


@lru_cache(maxsize=2)
def load_material(split: SampleSplit) -> Material:
    """Return the digits and photo regions of a split."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(bunch.images))
    rows = order[:NUM_TRAIN_DIGITS] if split == "train" else order[NUM_TRAIN_DIGITS:]
    digits = np.rint(bunch.images[rows] * (255 / 16)).astype(np.uint8)
    photos = tuple(
        Image.fromarray(np.ascontiguousarray(photo[:, PHOTO_COLUMNS[split]]))
        for photo in datasets.load_sample_images().images
    )
    return Material(digits, bunch.target[rows].astype(np.int64), photos)


def photo_crop(rng: np.random.Generator, photos: tuple[Image.Image, ...], size: int) -> Floats:
    """Return a random square of a photograph, mirrored half the time and darkened for contrast.

    Returns:
        (size, size, 3) values from 0 to 1.
    """
    photo = photos[rng.integers(len(photos))]
    side = int(rng.integers(min(96, size), min(photo.size) + 1))
    x_min, top = (int(rng.integers(edge - side + 1)) for edge in photo.size)
    box = (x_min, top, x_min + side, top + side)
    crop = photo.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2)
    pixels = np.asarray(crop, dtype=np.float32) / 255
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    contrast, brightness = rng.uniform(0.4, 0.7), rng.uniform(0.15, 0.4)
    return np.clip((pixels - pixels.mean()) * contrast + brightness, 0, 1).astype(np.float32)


def digit_alpha(
    rng: np.random.Generator,
    digit: Pixels,
    height: int,
    max_angle: float = 12,
    max_stretch: float = 0.15,
) -> Floats:
    """Return the opacity of a digit, enlarged smoothly, slightly rotated and cropped to its ink.

    Args:
        rng: Source of the angle and the stretch.
        digit: (8, 8) grey values.
        height: Height of the result in pixels.
        max_angle: Largest rotation in degrees.
        max_stretch: Largest relative change of the width.

    Returns:
        (height, width) values from 0 to 1; every border row and column has some ink.
    """
    side = 12 * max(round(height * 0.19), 4)  # half as large again as the result
    master = Image.fromarray(np.pad(digit, 2)).resize((side, side), Image.Resampling.BICUBIC)
    rotated = master.rotate(rng.uniform(-max_angle, max_angle), Image.Resampling.BICUBIC)
    ink = np.asarray(rotated) > 125
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    stretch = 1 + rng.uniform(-max_stretch, max_stretch)
    width = max(round((box[2] - box[0]) / (box[3] - box[1]) * height * stretch), 4)
    small = rotated.resize((width, height), Image.Resampling.BOX, box=box)
    grey = np.asarray(small, dtype=np.float32) / 255
    edge = np.clip((grey - 0.36) / 0.26, 0, 1)  # steeper than the enlargement's edge
    return (edge * edge * (3 - 2 * edge)).astype(np.float32)


def contrasting_colour(rng: np.random.Generator, background: Floats) -> Floats:
    """Return a random colour clearly brighter than most of the background.

    Always brighter: networks that train for minutes from random weights would otherwise spend them
    on learning that dark digits mean the same.

    Args:
        rng: Source of the colour.
        background: Pixels (H, W, 3) under the digit.
    """
    high = np.quantile(background @ LUMA, 0.9)
    luma = rng.uniform(min(high + 0.3, 0.85), min(high + 0.55, 1))
    hue = rng.random(3).astype(np.float32)
    tint = (hue - hue @ LUMA) * rng.uniform(0.4, 1.2)
    return np.clip(luma + tint * min(luma + 0.3, 1.3 - luma), 0, 1).astype(np.float32)


def paste(canvas: Floats, alpha: Floats, top: int, left: int, colour: Floats) -> None:
    """Blend a colour into the canvas (H, W, 3) by its opacity (h, w), in place."""
    height, width = alpha.shape
    patch = canvas[top : top + height, left : left + width]
    patch += alpha[..., None] * (colour - patch)


def to_image(canvas: Floats) -> Image.Image:
    """Return values (H, W, 3) from 0 to 1 as an 8-bit image."""
    return Image.fromarray(np.rint(canvas * 255).astype(np.uint8))
