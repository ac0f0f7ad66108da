"""Snow, frost and fog. Pixels are (S, S, 3), from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from datamodules.corruptions.blur import along, enlarged

Pixels = NDArray[np.float64]
Photographs = Sequence[Pixels]
GREY = (0.299, 0.587, 0.114)
ICE = (0.80, 0.90, 1.0)  # what frost tints white to


def snow(pixels: Pixels, fall: tuple[float, ...], rng: np.random.Generator) -> Pixels:
    """Bright flakes that fall to both sides, over a whitened image.

    Args:
        pixels: The image.
        fall: Mean, deviation, enlargement and threshold of the flakes, radius and deviation of
            their motion, and the share of the image as it is.
        rng: Draws the flakes and their direction.
    """
    mean, sigma, factor, threshold, radius, spread, kept = fall
    flakes = enlarged(rng.normal(mean, sigma, pixels.shape[:2]), factor)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    moved = along(flakes, int(radius), spread, rng.uniform(-135, -45))[..., None]
    grey = (pixels @ np.array(GREY))[..., None]
    whitened = kept * pixels + (1 - kept) * np.maximum(pixels, grey * 1.5 + 0.5)
    return whitened + moved + np.rot90(moved, 2)


def frost(
    pixels: Pixels,
    shares: tuple[float, float],
    rng: np.random.Generator,
    photographs: Photographs = (),
) -> Pixels:
    """The image plus a cut-out of a photograph of frost, or of a made texture.

    Args:
        pixels: The image.
        shares: Weights of the image and of the frost.
        rng: Draws the cut-out, or the texture.
        photographs: As large as the image at least.
    """
    side = len(pixels)
    if not photographs:
        return shares[0] * pixels + shares[1] * frost_texture(side, rng)
    photograph = photographs[int(rng.integers(len(photographs)))]
    top, left = (rng.integers(length - side + 1) for length in photograph.shape[:2])
    cut = photograph[top : top + side, left : left + side]
    return shares[0] * pixels + shares[1] * cut


def frost_texture(side: int, rng: np.random.Generator) -> Pixels:
    """Bluish ridges such as crystals have on a window: a stand-in for photographs of frost."""
    coarse, fine = (plasma(side, decay, rng) for decay in (1.9, 1.4))
    ridges = (1 - np.abs(2 * coarse - 1)) ** 3
    crystals = np.clip(0.25 + 0.5 * ridges + 0.6 * (fine - 0.5), 0, 1)
    return crystals[..., None] * np.array(ICE)


def fog(pixels: Pixels, air: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """Add clouds, and darken the sum to the image's brightest value.

    Args:
        pixels: The image.
        air: Strength of the clouds and how fast their finer parts fade.
        rng: Draws the clouds.
    """
    strength, decay = air
    brightest = pixels.max()
    clouds = plasma(len(pixels), decay, rng)[..., None]
    return (pixels + strength * clouds) * brightest / (brightest + strength)


def plasma(side: int, decay: float, rng: np.random.Generator) -> Pixels:
    """A fractal (S, S) from 0 to 1 by the diamond-square algorithm, on a torus of 2^n pixels.

    Args:
        side: Pixels that are cut out of it; the torus has 256 of 224.
        decay: What the amplitude of the noise is divided by, twice, from scale to scale.
        rng: Draws the noise.
    """
    size = max(2, 1 << (side - 1).bit_length())
    height = np.zeros((size, size))
    step, amplitude = size, 100.0

    def noisy(four: Pixels) -> Pixels:
        # The authors' amplitude is squared: it scales the noise, and the range it is drawn from.
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
