"""Snow, frost and fog. Pixels are (S, S, 3), from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from datamodules.corruptions.blur import average_along, enlarge

Pixels = NDArray[np.float64]
Photographs = Sequence[Pixels]
GREY = (0.299, 0.587, 0.114)
ICE = (0.80, 0.90, 1.0)  # tint of frost


def snow(pixels: Pixels, fall: tuple[float, ...], rng: np.random.Generator) -> Pixels:
    """Add bright flakes that fall to both sides to a whitened image.

    Args:
        pixels: The image.
        fall: Mean, standard deviation, enlargement and threshold of the flakes, radius and
            standard deviation of their motion, and the share of the unchanged image.
        rng: Source of the flakes and their direction.
    """
    mean, sigma, factor, threshold, radius, spread, mask = fall
    flakes = enlarge(rng.normal(mean, sigma, pixels.shape[:2]), factor)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    moved = average_along(flakes, int(radius), spread, rng.uniform(-135, -45))[..., None]
    grey = (pixels @ np.array(GREY))[..., None]
    whitened = mask * pixels + (1 - mask) * np.maximum(pixels, grey * 1.5 + 0.5)
    return whitened + moved + np.rot90(moved, 2)


def frost(
    pixels: Pixels,
    shares: tuple[float, float],
    rng: np.random.Generator,
    photographs: Photographs = (),
) -> Pixels:
    """Add a crop of a photograph of frost, or of a generated texture.

    Args:
        pixels: The image.
        shares: Weights of the image and of the frost.
        rng: Source of the crop or the texture.
        photographs: Photographs at least as large as the image.
    """
    side = len(pixels)
    if not photographs:
        return shares[0] * pixels + shares[1] * frost_texture(side, rng)
    photograph = photographs[int(rng.integers(len(photographs)))]
    top, start = (rng.integers(length - side + 1) for length in photograph.shape[:2])
    cut = photograph[top : top + side, start : start + side]
    return shares[0] * pixels + shares[1] * cut


def frost_texture(side: int, rng: np.random.Generator) -> Pixels:
    """Return bluish ridges like ice on a window, in place of photographs of frost."""
    coarse, fine = (plasma(side, decay, rng) for decay in (1.9, 1.4))
    ridges = (1 - np.abs(2 * coarse - 1)) ** 3
    crystals = np.clip(0.25 + 0.5 * ridges + 0.6 * (fine - 0.5), 0, 1)
    return crystals[..., None] * np.array(ICE)


def fog(pixels: Pixels, air: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """Add clouds, then scale the sum to the image's brightest value.

    Args:
        pixels: The image.
        air: Strength of the clouds, and decay of their finer parts.
        rng: Source of the clouds.
    """
    strength, decay = air
    brightest = pixels.max()
    clouds = plasma(len(pixels), decay, rng)[..., None]
    return (pixels + strength * clouds) * brightest / (brightest + strength)


def plasma(side: int, decay: float, rng: np.random.Generator) -> Pixels:
    """Return a fractal (S, S) from 0 to 1 by the diamond-square algorithm on a torus.

    Args:
        side: Side S of the result, cut out of a torus of 2^n pixels (256 for S = 224).
        decay: Factor that divides the noise's amplitude, twice, from scale to scale.
        rng: Source of the noise.
    """
    size = max(2, 1 << (side - 1).bit_length())
    height = np.zeros((size, size))
    step, amplitude = size, 100.0

    def noisy(four: Pixels) -> Pixels:
        # As in the authors' code, the amplitude counts twice: as a factor and as the range.
        return four / 4 + amplitude * rng.uniform(-amplitude, amplitude, four.shape)

    while step >= 2:
        half = step // 2
        corners = height[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        height[half::step, half::step] = noisy(pairs + np.roll(pairs, -1, 1))
        middles = height[half::step, half::step]
        for axis, place in ((0, (slice(None, None, step), slice(half, None, step))),
                            (1, (slice(half, None, step), slice(None, None, step)))):  # fmt: skip
            across = middles + np.roll(middles, 1, axis)
            ends = corners + np.roll(corners, -1, 1 - axis)
            height[place] = noisy(across + ends)
        step, amplitude = half, amplitude / decay
    height -= height.min()
    return (height / height.max())[:side, :side]
