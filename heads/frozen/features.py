"""Features of labelled images, and the interface of classifiers solved from them.

Axes: N images, D features, B images of a batch, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

Classify = Callable[[Tensor], Tensor]  # features (B, D) -> scores (B, K), highest wins


@dataclass(frozen=True)
class Features:
    """Features of the images of a split.

    Attributes:
        values: (N, D), float32.
        labels: (N,), int64.
    """

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Tensor) -> Features:
        """Return the features of some images."""
        return Features(self.values[rows], self.labels[rows])


@dataclass(frozen=True)
class Solution:
    """A solved classifier with its metrics.

    Attributes:
        metrics: Accuracies on the test images in percent, and values chosen on the way.
        classify: The classifier.
        headline: Metrics that represent the method: ``top1``, and ``top5`` if it exists.
        remarks: Findings that may be unintended, one line each.
    """

    metrics: Mapping[str, float]
    classify: Classify
    headline: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class SolveOptions:
    """Options of the run that solving needs.

    Attributes:
        seed: Seed of all draws.
        device: Device that computes similarities.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Method(Protocol):
    """A method that solves a classifier from features; its options are its attributes."""

    def solve(self, train: Features, test: Features, classes: int, draw: SolveOptions) -> Solution:
        """Solve a classifier of K = ``classes`` from ``train`` and evaluate it on ``test``."""


def accuracy(scores: Tensor, labels: Tensor, top_k: int = 1) -> float:
    """Return the percentage of images with their class among the ``top_k`` of (N, K) scores."""
    classes = scores.shape[1]
    share = multiclass_accuracy(scores, labels, classes, average="micro", top_k=top_k)
    return 100 * float(share)
