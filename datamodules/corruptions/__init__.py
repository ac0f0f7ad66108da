"""The 15 corruptions of ImageNet-C, each in five severities, for images of any size.

Source: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019 (https://arxiv.org/abs/1903.12261); parameters from the authors' code
(https://github.com/hendrycks/robustness).

This version uses numpy, scipy and Pillow. Its random numbers differ from the authors', and so do
the frost textures unless photographs are given. Compare figures on these copies with each other
only, as those on the published files differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.corruptions import blur, digital, noise, weather
from datamodules.files.values import refuse

Pixels = NDArray[np.float64]
SEVERITIES = (1, 2, 3, 4, 5)
# Function and parameters by severity, per kind.
CORRUPTIONS: Mapping[str, tuple[Callable[..., Pixels], tuple[Any, ...]]] = {
    "gaussian_noise": (noise.gaussian, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (noise.shot, (60, 25, 12, 5, 3)),
    "impulse_noise": (noise.impulse, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (blur.defocus, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (blur.glass, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (blur.motion, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (
        blur.zoom,
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    "snow": (
        weather.snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (weather.frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (weather.fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (digital.brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (digital.contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    # Shares of 244 pixels, a number in the authors' code.
    "elastic_transform": (
        digital.elastic,
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": (digital.pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (digital.jpeg, (25, 18, 15, 10, 7)),
}
KINDS = tuple(CORRUPTIONS)


def corrupt(
    image: Image.Image,
    kind: str,
    severity: int,
    rng: np.random.Generator,
    frost: weather.Photographs = (),
) -> Image.Image:
    """Return a corrupted copy of a square RGB image.

    Args:
        image: 8-bit RGB, square.
        kind: One of ``KINDS``.
        severity: From 1 to 5.
        rng: Source of all random numbers.
        frost: Photographs of frost (H, W, 3) with values from 0 to 1, at least as large as the
            image; if empty, a texture is generated.

    Raises:
        ValueError: Kind or severity is unknown, or the image is not square.
    """
    is_valid = kind in CORRUPTIONS and severity in SEVERITIES
    faults = {
        f"{kind!r} of severity {severity} is unknown: kinds are {', '.join(KINDS)}, severities "
        "1 to 5": not is_valid,
        f"needs square images, got {image.size} pixels; crop it": image.width != image.height,
    }
    refuse("corruption", faults)
    make, parameters = CORRUPTIONS[kind]
    pixels = np.asarray(image.convert("RGB")) / 255.0
    options = {"photographs": frost} if kind == "frost" else {}
    corrupted = make(pixels, parameters[severity - 1], rng, **options)
    # Truncated instead of rounded, as in the published files.
    return Image.fromarray((np.clip(corrupted, 0, 1) * 255).astype(np.uint8))
