"""The mean corruption error of ImageNet-C, relative to AlexNet's.

Source: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019 (https://arxiv.org/abs/1903.12261), Sec. 4.1; AlexNet's errors are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

# Top-1 errors of AlexNet in severities 1 to 5.
ALEXNET: Mapping[str, tuple[float, ...]] = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}
SEVERITIES = len(ALEXNET["fog"])

Errors = Mapping[str, Mapping[int, float]]


def corruption_errors(errors: Errors) -> dict[str, float]:
    """Return the CE in percent of each kind with five severities: the error relative to AlexNet's.

    Args:
        errors: Share of misclassified images per kind and severity.
    """
    return {
        kind: 100 * fmean(errors[kind].values()) / fmean(alexnet)
        for kind, alexnet in ALEXNET.items()
        if set(errors.get(kind, ())) == set(range(1, SEVERITIES + 1))
    }


def mean_corruption_error(errors: Errors) -> float | None:
    """Return the mean CE of the 15 kinds in percent (mCE); None if one of 75 errors is missing."""
    ratios = corruption_errors(errors)
    return fmean(ratios.values()) if len(ratios) == len(ALEXNET) else None
