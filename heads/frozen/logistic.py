"""Linear probing by logistic regression, solved by L-BFGS.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
ICML 2021, App. A.3 (at most 1000 iterations, the strength of L2 found by halving an interval), by
scikit-learn as there. Features are standardised by those of training, as the probe by SGD does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.frozen.features import Draw, Features, Solved, accuracy

# Decades of C, the inverse strength of L2, that are tried first; then halves down to an eighth.
COARSE = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
FINEST = 0.125
TOP = (1, 5)
MANY_CLASSES = "The number of unique classes is greater"  # scikit-learn's doubt of few images


@dataclass(frozen=True)
class Logistic:
    """Fit on the training images, with C from a part of them that is held out.

    Attributes:
        c: Inverse strength of L2 on the sum of the losses; None looks for the best.
        held_out: Share of each class that C is chosen by; the last fit is on all images.
        max_iter: Iterations of a fit.
    """

    c: float | None = None
    held_out: float = 0.1
    max_iter: int = 1000

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.c is not None and self.c <= 0:
            raise ValueError(f"head.logistic.c must be above 0 or null, got {self.c}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"head.logistic.held_out={self.held_out} is not between 0 and 1")
        if self.max_iter < 1:
            raise ValueError(f"head.logistic.max_iter must be at least 1, got {self.max_iter}")

    def solve(self, train: Features, test: Features, classes: int, draw: Draw) -> Solved:
        """Fit; see ``Method``.

        Raises:
            ValueError: Too few images to hold some out.
        """
        if len(train.labels.unique()) < 2:
            raise ValueError("logistic regression needs training images of two classes at least")
        chosen = self.c
        if chosen is None:
            kept, tried = _split(train, self.held_out, draw.seed)

            def judged(decade: float) -> float:
                fitted, _ = _fit(kept, classes, 10.0**decade, self.max_iter)
                return accuracy(fitted(tried.values), tried.labels)

            chosen = 10.0 ** best_decade(judged)
        classify, ended = _fit(train, classes, chosen, self.max_iter)
        scores = classify(test.values)
        metrics = {f"top{k}_lbfgs": accuracy(scores, test.labels, k) for k in TOP if k < classes}
        remark = f"L-BFGS had not converged after {self.max_iter} iterations with C={chosen:.3g}"
        remarks = () if ended else (f"{remark}; head.logistic.max_iter sets more",)
        headline = {name.partition("_")[0]: name for name in metrics}
        return Solved({**metrics, "lbfgs_c": chosen}, classify, headline, remarks)


def best_decade(judged: Callable[[float], float]) -> float:
    """The decade of C with the highest accuracy; of equal ones the strongest regularisation.

    Args:
        judged: Accuracy with C = 10 ** its argument.
    """
    found = {decade: judged(decade) for decade in COARSE}
    step = COARSE[1] - COARSE[0]
    while step > FINEST:
        step /= 2
        best = max(sorted(found), key=found.__getitem__)
        for decade in (best - step, best + step):
            if decade not in found and COARSE[0] <= decade <= COARSE[-1]:
                found[decade] = judged(decade)
    return max(sorted(found), key=found.__getitem__)


def _split(train: Features, share: float, seed: int) -> tuple[Features, Features]:
    """The images to fit on while C is looked for, and the share of each class to judge by."""
    drawn = np.random.default_rng([seed, len(train)])
    held = torch.zeros(len(train), dtype=torch.bool)
    for label in train.labels.unique().tolist():
        rows = torch.nonzero(train.labels == label)[:, 0].numpy()
        if len(rows) > 1:
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            held[torch.from_numpy(drawn.permutation(rows)[:count])] = True
    if not held.any():
        raise ValueError(
            "no class has a second training image that could be held out to choose C; pass "
            "head.logistic.c=1"
        )
    return train.part(~held), train.part(held)


def _fit(train: Features, classes: int, c: float, max_iter: int) -> tuple[Any, bool]:
    """A classifier of features, and whether its fit has converged."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train.values.numpy())
    values = scaler.transform(train.values.numpy())
    regression = LogisticRegression(C=c, max_iter=max_iter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", MANY_CLASSES)
        regression.fit(values, train.labels.numpy())
    ended = int(max(regression.n_iter_)) < max_iter
    weight, bias = regression.coef_, regression.intercept_
    if len(regression.classes_) == 2:
        # Of two classes scikit-learn has the second one's logit alone.
        weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
    known = torch.from_numpy(regression.classes_)
    return linear(scaler, weight, bias, known, classes), ended


def linear(scaler: Any, weight: Any, bias: Any, known: Tensor, classes: int) -> Any:
    """A linear map after a scaler; classes without a training image are never chosen.

    Args:
        scaler: scikit-learn's, fitted.
        weight: (classes that are known, D).
        bias: (classes that are known,).
        known: Their labels.
        classes: K.
    """
    mean, scale, weight, bias = (
        torch.as_tensor(part, dtype=torch.float64)
        for part in (scaler.mean_, scaler.scale_, weight, bias)
    )

    def classify(features: Tensor) -> Tensor:
        scores = (features.cpu().double() - mean) / scale @ weight.T + bias
        all_scores = scores.new_full((len(scores), classes), -torch.inf)
        return all_scores.index_copy(1, known, scores)

    return classify
