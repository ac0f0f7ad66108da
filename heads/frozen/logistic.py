"""Linear probing by logistic regression, solved by L-BFGS.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
ICML 2021, App. A.3: at most 1000 iterations, L2 strength by interval halving, scikit-learn. The
training features standardise all features, as in the SGD probe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backbones.layers.bounds import check_positive, check_range, check_share
from heads.frozen.features import Features, Solution, SolveOptions, accuracy

# Decades of C, the inverse L2 strength, to try first; then steps halve down to an eighth.
COARSE = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
FINEST = 0.125
TOP = (1, 5)
MANY_CLASSES = "The number of unique classes is greater"  # scikit-learn's warning for few images


@dataclass(frozen=True)
class Logistic:
    """Fit on the training images; a held-out part of them chooses C.

    Attributes:
        c: Inverse L2 strength on the sum of the losses; None searches for the best.
        held_out: Share per class that C is chosen on; the final fit uses all images.
        max_iter: Most iterations of a fit.
    """

    c: float | None = None
    held_out: float = 0.1
    max_iter: int = 1000

    def __post_init__(self) -> None:
        if self.c is not None:
            check_positive("head.logistic.c", self.c)
        check_positive("head.logistic.held_out", self.held_out)
        check_share("head.logistic.held_out", self.held_out)
        check_range("head.logistic.max_iter", self.max_iter, 1)

    def solve(self, train: Features, test: Features, classes: int, draw: SolveOptions) -> Solution:
        """Fit; see ``Method``.

        Raises:
            ValueError: There are too few images to hold some out.
        """
        if len(train.labels.unique()) < 2:
            raise ValueError("logistic regression needs training images of at least two classes")
        strength = self.c
        if strength is None:
            fit_part, tried = _split(train, self.held_out, draw.seed)

            def evaluate(decade: float) -> float:
                fitted, _ = _fit(fit_part, classes, 10.0**decade, self.max_iter)
                return accuracy(fitted(tried.values), tried.labels)

            strength = 10.0 ** best_decade(evaluate)
        classify, converged = _fit(train, classes, strength, self.max_iter)
        scores = classify(test.values)
        metrics = {f"top{k}_lbfgs": accuracy(scores, test.labels, k) for k in TOP if k < classes}
        remark = f"L-BFGS did not converge in {self.max_iter} iterations with C={strength:.3g}"
        remarks = () if converged else (f"{remark}; raise head.logistic.max_iter",)
        headline = {name.partition("_")[0]: name for name in metrics}
        return Solution({**metrics, "lbfgs_c": strength}, classify, headline, remarks)


def best_decade(evaluate: Callable[[float], float]) -> float:
    """Return the decade of C with the highest accuracy; ties go to the strongest regularisation.

    Args:
        evaluate: Returns the accuracy with C = 10 ** its argument.
    """
    scores = {decade: evaluate(decade) for decade in COARSE}
    step = COARSE[1] - COARSE[0]
    while step > FINEST:
        step /= 2
        best = max(sorted(scores), key=scores.__getitem__)
        for decade in (best - step, best + step):
            if decade not in scores and COARSE[0] <= decade <= COARSE[-1]:
                scores[decade] = evaluate(decade)
    return max(sorted(scores), key=scores.__getitem__)


def _split(train: Features, share: float, seed: int) -> tuple[Features, Features]:
    """Return the images to fit on and the held-out share of each class, to choose C."""
    generator = np.random.default_rng([seed, len(train)])
    is_held_out = torch.zeros(len(train), dtype=torch.bool)
    for label in train.labels.unique().tolist():
        rows = torch.nonzero(train.labels == label)[:, 0].numpy()
        if len(rows) > 1:
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            is_held_out[torch.from_numpy(generator.permutation(rows)[:count])] = True
    if not is_held_out.any():
        raise ValueError(
            "choosing C holds out images, but every class has only one training image; pass "
            "head.logistic.c=1"
        )
    return train.select(~is_held_out), train.select(is_held_out)


def _fit(train: Features, classes: int, c: float, max_iter: int) -> tuple[Any, bool]:
    """Return a classifier of features, and True if its fit converged."""
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
    converged = int(max(regression.n_iter_)) < max_iter
    weight, bias = regression.coef_, regression.intercept_
    if len(regression.classes_) == 2:
        # For two classes scikit-learn keeps only the second one's logit.
        weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
    seen_classes = torch.from_numpy(regression.classes_)
    return make_linear(scaler, weight, bias, seen_classes, classes), converged


def make_linear(scaler: Any, weight: Any, bias: Any, labels: Tensor, classes: int) -> Any:
    """Return a linear classifier after a scaler; classes without training images never win.

    Args:
        scaler: scikit-learn's fitted scaler.
        weight: (known classes, D).
        bias: (known classes,).
        labels: Labels of the known classes.
        classes: Number of classes K.
    """
    mean, scale, weight, bias = (
        torch.as_tensor(part, dtype=torch.float64)
        for part in (scaler.mean_, scaler.scale_, weight, bias)
    )

    def classify(features: Tensor) -> Tensor:
        scores = (features.cpu().double() - mean) / scale @ weight.T + bias
        all_scores = scores.new_full((len(scores), classes), -torch.inf)
        return all_scores.index_copy(1, labels, scores)

    return classify
