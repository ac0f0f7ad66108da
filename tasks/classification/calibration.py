"""Calibration of a classifier's probabilities: error, Brier score, and temperature scaling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassCalibrationError
from torchmetrics.utilities import dim_zero_cat

BINS = 15
SMALLEST, LARGEST = 0.01, 100.0  # bounds of a temperature


class Calibration(Metric):
    """Expected calibration error, Brier score and negative log-likelihood of logits.

    Source: the error of the surest class in 15 bins of equal width, Guo et al., "On Calibration of
    Modern Neural Networks", https://arxiv.org/abs/1706.04599, equation 3; Brier's score sums the
    squared differences over the classes and averages over the images.

    Args:
        classes: Number of classes K.
        temperature: Divisor of the logits.
    """

    full_state_update = False
    brier: Tensor
    nll: Tensor
    count: Tensor

    def __init__(self, classes: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.error: Any = MulticlassCalibrationError(classes, n_bins=BINS, norm="l1")
        for name in ("brier", "nll", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (B, K) with labels (B,); a negative label is unknown."""
        mask = labels >= 0
        labels = labels[mask]
        if not len(labels):
            return
        scaled = logits[mask].float() / self.temperature
        shares = scaled.softmax(-1)
        self.error.update(shares, labels)
        truth = F.one_hot(labels, shares.shape[1])
        self.brier += (shares - truth).double().square().sum()
        self.nll += F.cross_entropy(scaled, labels, reduction="sum").double()
        self.count += len(labels)

    def compute(self) -> dict[str, Tensor]:
        """Return ``ece`` and ``brier`` from 0 to 1 and 2, and ``nll`` in nats."""
        return {
            "ece": self.error.compute(),
            "brier": (self.brier / self.count).float(),
            "nll": (self.nll / self.count).float(),
        }

    def reset(self) -> None:
        """Forget all images."""
        super().reset()
        self.error.reset()


class TemperatureFit(Metric):
    """Temperature that minimises the negative log-likelihood of validation images.

    Source: Guo et al., section 4.2. All logits are kept: 4 K bytes per image. If all images are
    classified correctly, the likelihood grows without end as the temperature falls; it is then 1.
    """

    full_state_update = False
    logits: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("logits", "labels"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (B, K) with labels (B,); a negative label is unknown."""
        mask = labels >= 0
        self.logits.append(logits[mask].float())
        self.labels.append(labels[mask])

    def compute(self) -> Tensor:
        """Return the temperature; 1 without images or without a mistake."""
        labels = dim_zero_cat(self.labels) if len(self.labels) else torch.empty(0)
        if not len(labels):
            return torch.ones(())
        logits = dim_zero_cat(self.logits).double()
        if (logits.argmax(1) == labels).all():
            return torch.ones(())
        from scipy.optimize import minimize_scalar  # half a second, which prediction saves

        def loss(log_temperature: float) -> float:
            scaled = logits / torch.tensor(log_temperature, dtype=torch.float64).exp()
            return float(F.cross_entropy(scaled, labels))

        limits = [float(torch.tensor(limit).log()) for limit in (SMALLEST, LARGEST)]
        optimum = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-6})
        return torch.tensor(optimum.x).exp().float()
