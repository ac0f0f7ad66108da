"""Features of labelled images, and what solving a classifier from them gives.

Axes: N images, D features, B images of a batch, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

Classify = Callable[[Tensor], Tensor]  # features (B, D) -> scores (B, K), the highest of which wins


@dataclass(frozen=True)
class Features:
    """What a backbone makes of the images of a split.

    Attributes:
        values: (N, D), float32.
        labels: (N,), int64.
    """

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def part(self, rows: Tensor) -> Features:
        """Some of the images."""
        return Features(self.values[rows], self.labels[rows])


@dataclass(frozen=True)
class Solved:
    """A classifier that was solved.

    Attributes:
        metrics: Accuracies in percent on the test images, and what was chosen on the way.
        classify: The classifier.
        headline: Which of the metrics stands for all: ``top1``, and ``top5`` if it has one.
        remarks: What may not be meant, a line each.
    """

    metrics: Mapping[str, float]
    classify: Classify
    headline: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """What solving needs of the run.

    Attributes:
        seed: Of whatever is drawn.
        device: Where similarities are computed.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Method(Protocol):
    """A way to get a classifier out of features; its options are its attributes."""

    def solve(self, train: Features, test: Features, classes: int, draw: Draw) -> Solved:
        """Solve a classifier of K = ``classes`` from ``train`` and judge it by ``test``."""


def accuracy(scores: Tensor, labels: Tensor, top_k: int = 1) -> float:
    """Share in percent of images whose class is among the ``top_k`` best of (N, K) scores."""
    classes = scores.shape[1]
    share = multiclass_accuracy(scores, labels, classes, average="micro", top_k=top_k)
    return 100 * float(share)
