"""Few-shot classification by regularised least squares.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, Sec. 4.1 (targets of -1 and
1, closed form) and the authors' big_vision (features standardised by the few images, strengths of
2 ** -10 to 2 ** 19). The strength is chosen by leave-one-out on the few images, in scikit-learn's
closed form; big_vision chooses it on the test images.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backbones.layers.bounds import check_range
from heads.frozen.features import Features, Solution, SolveOptions, accuracy
from heads.frozen.logistic import MANY_CLASSES, make_linear

STRENGTHS = tuple(2.0**power for power in range(-10, 20))


@dataclass(frozen=True)
class FewShot:
    """Fit on a few training images per class, drawn several times; mean and standard deviation.

    Attributes:
        shots: Numbers of images per class; a smaller draw is part of a larger one.
        draws: Number of draws.
    """

    shots: Sequence[int] = (1, 5, 10)
    draws: int = 5

    def __post_init__(self) -> None:
        check_range("head.few_shot.shots", min(self.shots, default=0), 1)
        check_range("head.few_shot.draws", self.draws, 1)

    def solve(self, train: Features, test: Features, classes: int, draw: SolveOptions) -> Solution:
        """Draw and fit; see ``Method``. The classifier is that of the last draw with most shots.

        Raises:
            ValueError: A class has too few images.
        """
        counts = sorted(set(self.shots))
        have = torch.bincount(train.labels, minlength=classes)
        rare = torch.nonzero(have < counts[-1])[:, 0].tolist()
        if rare:
            raise ValueError(
                f"{len(rare)} of {classes} classes have fewer than {counts[-1]} training images, "
                f"such as class {rare[0]} with {int(have[rare[0]])}; pass fewer, such as "
                "head.few_shot.shots=[1]"
            )
        scores: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(self.draws):
            orders = _orders(train, classes, np.random.default_rng([draw.seed, number]))
            for count in counts:
                few = train.select(torch.cat([rows[:count] for rows in orders]))
                classify = _fit(few, classes)
                scores[count].append(accuracy(classify(test.values), test.labels))
        metrics = {}
        for count, values in scores.items():
            metrics[f"top1_{count}shot"] = statistics.fmean(values)
            if self.draws > 1:
                metrics[f"top1_{count}shot_std"] = statistics.stdev(values)
        return Solution(metrics, classify, {"top1": f"top1_{counts[-1]}shot"})


def _orders(train: Features, classes: int, generator: np.random.Generator) -> list[torch.Tensor]:
    """Return the training images of each class in a random order."""
    rows = [torch.nonzero(train.labels == label)[:, 0].numpy() for label in range(classes)]
    return [torch.from_numpy(generator.permutation(of_class)) for of_class in rows]


def _fit(few: Features, classes: int) -> Any:
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.preprocessing import StandardScaler

    values = few.values.double().numpy()
    scaler = StandardScaler().fit(values)
    ridge = RidgeClassifierCV(alphas=STRENGTHS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", MANY_CLASSES)
        ridge.fit(scaler.transform(values), few.labels.numpy())
    weight, bias = np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
    if classes == 2:
        weight, bias = np.concatenate([-weight, weight]), np.concatenate([-bias, bias])
    return make_linear(scaler, weight, bias, torch.from_numpy(ridge.classes_), classes)
