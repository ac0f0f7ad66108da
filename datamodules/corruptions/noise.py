"""Noise drawn independently per value. Pixels are (S, S, 3), from 0 to 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.float64]


def gaussian(pixels: Pixels, sigma: float, rng: np.random.Generator) -> Pixels:
    """Add normal noise of this standard deviation."""
    return pixels + rng.normal(scale=sigma, size=pixels.shape)


def shot(pixels: Pixels, photons: float, rng: np.random.Generator) -> Pixels:
    """Draw photon counts; a white pixel expects ``photons`` of them."""
    return rng.poisson(pixels * photons) / photons


def impulse(pixels: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    """Set this share of the values to 0 or 1."""
    hit, white = rng.random(pixels.shape) < share, rng.random(pixels.shape) < 0.5
    return np.where(hit, white, pixels).astype(np.float64)
