"""Errors of a classifier: confusion and calibration from probabilities and labels.

Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017,
https://arxiv.org/abs/1706.04599, Sec. 2 (reliability and ECE, with 15 bins of equal width).

Axes: n images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Accuracy as a function of confidence.

    Attributes:
        counts: Images per bin; bin i has confidences in (i / bins, (i + 1) / bins].
        confidence: Mean confidence per bin; NaN for an empty bin.
        accuracy: Accuracy per bin; NaN for an empty bin.
        error: ECE, the mean of |accuracy - confidence| over images.
    """

    counts: Tensor
    confidence: Tensor
    accuracy: Tensor
    error: float


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Compute the reliability of probabilities (n, K) for labels (n,)."""
    import torch

    confidence, predicted = probabilities.double().max(1)
    correct = (predicted == labels).double()
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(3, bins, dtype=torch.float64)
    for row, values in enumerate((torch.ones_like(correct), confidence, correct)):
        sums[row].index_add_(0, index, values)
    counts = sums[0]
    error = float((sums[2] - sums[1]).abs().sum() / len(labels))
    return Reliability(counts.long(), sums[1] / counts, sums[2] / counts, error)


def confusion(guesses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Count images by class (rows) and prediction (columns), (K, K)."""
    import torch

    flat = torch.bincount(labels * classes + guesses, minlength=classes * classes)
    return flat.view(classes, classes)


def confused_pairs(counts: Tensor, most: int = 10) -> list[tuple[int, int, int]]:
    """Return the most frequent errors as (class, prediction, count)."""
    wrong = counts.clone().fill_diagonal_(0)
    values, indices = wrong.flatten().sort(descending=True, stable=True)
    classes = len(counts)
    return [
        (int(index) // classes, int(index) % classes, int(value))
        for value, index in zip(values[:most], indices[:most], strict=True)
        if value > 0
    ]
