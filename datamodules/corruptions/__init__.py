"""The 15 corruptions of ImageNet-C, each in five severities, for images of any size.

Source: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019 (https://arxiv.org/abs/1903.12261); parameters of the authors' code.

Written anew on numpy, scipy and Pillow: random numbers are others than the authors', and so are the
frost textures unless photographs are given. Figures on copies made here compare with each other,
not with those on the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.corruptions import blur, digital, noise, weather

Pixels = NDArray[np.float64]
SEVERITIES = (1, 2, 3, 4, 5)
# Per kind what makes it, and its parameters by severity.
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
    # In shares of 244 pixels: the authors' code has that number.
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
    """A corrupted copy of a square RGB image.

    Args:
        image: 8-bit RGB, as wide as high.
        kind: One of ``KINDS``.
        severity: From 1 to 5.
        rng: All that is random is drawn from it.
        frost: Photographs of frost (H, W, 3) with values from 0 to 1, as large as the image at
            least; without any a texture is made.

    Raises:
        ValueError: No such kind or severity, or an image that is not square.
    """
    if kind not in CORRUPTIONS or severity not in SEVERITIES:
        raise ValueError(
            f"no corruption {kind!r} of severity {severity}: kinds are {', '.join(KINDS)}, "
            "severities 1 to 5"
        )
    if image.width != image.height:
        raise ValueError(f"corruptions are for square images; this one has {image.size} pixels")
    make, parameters = CORRUPTIONS[kind]
    pixels = np.asarray(image.convert("RGB")) / 255.0
    options = {"photographs": frost} if kind == "frost" else {}
    made = make(pixels, parameters[severity - 1], rng, **options)
    # Cut off, not rounded, as the published files are.
    return Image.fromarray((np.clip(made, 0, 1) * 255).astype(np.uint8))
