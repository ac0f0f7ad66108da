"""Errors of forecasts, summed over all elements and processes before dividing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from heads.forecasting import pinball


class ForecastErrors(Metric):
    """Squared and absolute errors by step of the horizon; with quantiles pinball loss and coverage.

    The point forecast of quantiles is the one nearest to the median. Coverage is the share of
    values from the lowest to the highest quantile. Sums are float64, so no figure depends on the
    size of batches.

    Args:
        horizon: T.
        quantiles: Levels; empty for point forecasts.
    """

    full_state_update = False
    squared: Tensor
    absolute: Tensor
    pinball: Tensor
    covered: Tensor
    count: Tensor

    def __init__(self, horizon: int, quantiles: Sequence[float] = (), **options: Any) -> None:
        super().__init__(**options)
        self.quantiles = tuple(quantiles)
        for name in ("squared", "absolute", "pinball", "covered"):
            zero = torch.zeros(horizon, dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, truth: Tensor) -> None:
        """Add a batch: (B, T, V) or (B, T, V, Q), and (B, T, V)."""
        predicted, truth = predicted.double(), truth.double()
        if self.quantiles:
            losses = pinball(predicted, truth, self.quantiles).mean(-1)
            inside = (predicted[..., 0] <= truth) & (truth <= predicted[..., -1])
            self.pinball += losses.sum(dim=(0, 2))
            self.covered += inside.double().sum(dim=(0, 2))
        errors = point_forecast(predicted, self.quantiles) - truth
        self.squared += errors.square().sum(dim=(0, 2))
        self.absolute += errors.abs().sum(dim=(0, 2))
        self.count += errors.shape[0] * errors.shape[2]

    def compute(self) -> dict[str, Tensor]:
        """Return the means of each step (T,) by the metric's name."""
        sums = {"mse": self.squared, "mae": self.absolute}
        if self.quantiles:
            sums |= {"pinball": self.pinball, "coverage": self.covered}
        return {name: total / self.count for name, total in sums.items()}


def point_forecast(predicted: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Return the forecast itself, or of quantiles (..., Q) the one nearest to the median."""
    if not quantiles:
        return predicted
    nearest = min(range(len(quantiles)), key=lambda index: abs(quantiles[index] - 0.5))
    return predicted[..., nearest]
