"""Forecasts from a backbone for series: normalisation per series, and the layer to the horizon.

Axes: B series, L look-back, M variables of the input, V variables to predict (the first of M), T
horizon, Q quantiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.hosts.scaffolds.series import Normalisation, SeriesBackbone
from backbones.layers.bounds import check_share
from backbones.options import Remembering, check_value

TARGETS = ("Forecaster",)

Loss = Literal["mse", "mae", "huber"]
EPS = 1e-5
LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.smooth_l1_loss}


def revin(series: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over time: (B, L, M) -> two of (B, 1, M).

    The deviation is sqrt(var + 1e-5) with the population variance. As in FFNet, PatchTST and
    iTransformer, affine weights are left out and no gradient flows through the statistics.

    Source: Kim et al., "Reversible Instance Normalization", ICLR 2022,
    https://openreview.net/forum?id=cGDAkQo1C0p.
    """
    variance, mean = torch.var_mean(series.detach(), dim=1, correction=0, keepdim=True)
    return mean, (variance + EPS).sqrt()


def last_value(series: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last value and ones: (B, L, M) -> two of (B, 1, M).

    Source: Zeng et al., "Are Transformers Effective for Time Series Forecasting?", AAAI 2023,
    https://arxiv.org/abs/2205.13504, Sec. 4 (NLinear).
    """
    last = series[:, -1:].detach()
    return last, torch.ones_like(last)


def unchanged(series: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros and ones: (B, L, M) -> two of (B, 1, M)."""
    zero = torch.zeros_like(series[:, -1:])
    return zero, zero + 1


# What is subtracted from each series, and what it is then divided by; both are put back.
STATISTICS = {"revin": revin, "last": last_value, "none": unchanged}


class Forecaster(Remembering, nn.Module):
    """Normalised series -> backbone -> one layer to the horizon -> the series' own units.

    Args:
        backbone: Backbone for series.
        horizon: T.
        targets: V, the variables to predict; the input may have more.
        normalisation: "revin", "last" or "none"; None for that of the backbone's authors.
        drop: Dropout of the last layer; see ``SeriesBackbone.forecaster``.
        loss: "mse", "mae" or "huber", without quantiles.
        quantiles: Levels such as [0.1, 0.5, 0.9], predicted instead of the mean and trained by the
            pinball loss.

    Shape: (B, L, M) -> (B, T, V), or (B, T, V, Q) with quantiles.

    Raises:
        ValueError: An unknown option, or quantiles that are not ascending shares.
    """

    def __init__(
        self,
        backbone: SeriesBackbone,
        horizon: int,
        targets: int,
        *,
        normalisation: Normalisation | None = None,
        drop: float = 0.0,
        loss: Loss = "mse",
        quantiles: Sequence[float] = (),
    ) -> None:
        super().__init__()
        check_value("head.normalisation", normalisation, Normalisation | None)
        check_value("head.loss", loss, Loss)
        check_share("head.drop", drop)
        ascending = all(low < high for low, high in itertools.pairwise((0.0, *quantiles, 1.0)))
        if quantiles and not ascending:
            raise ValueError(
                "head.quantiles must ascend between 0 and 1, such as [0.1,0.5,0.9]; got "
                f"{list(quantiles)}"
            )
        self.backbone = backbone
        self.horizon, self.targets, self.loss_name = horizon, targets, loss
        self.quantiles = tuple(quantiles)
        self.statistics = STATISTICS[normalisation or backbone.normalisation]
        self.forecaster = backbone.forecaster(horizon * max(1, len(quantiles)), drop)

    def forward(self, series: Tensor) -> Tensor:
        """Forecast series: (B, L, M) -> (B, T, V), or (B, T, V, Q)."""
        shift, scale = self.statistics(series)
        (features,) = self.backbone((series - shift) / scale)
        weight = next(self.forecaster.parameters(), None)
        if weight is not None:  # a backbone without weights keeps the type of its input
            features = features.to(weight.dtype)
        y = self.forecaster(features[:, :, : self.targets]).transpose(1, 2)  # (B, T * Q, V)
        y = y * scale[..., : self.targets] + shift[..., : self.targets]
        if not self.quantiles:
            return y
        return y.unflatten(1, (self.horizon, -1)).transpose(2, 3)

    def elementwise_loss(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of each element: (B, T, V) or (B, T, V, Q), and (B, T, V) -> (B, T, V).

        With quantiles it is the mean of their pinball losses.
        """
        if self.quantiles:
            return pinball(predicted, truth, self.quantiles).mean(-1)
        return LOSSES[self.loss_name](predicted, truth.to(predicted.dtype), reduction="none")

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of ``series`` with ``future`` (B, T, V)."""
        name = "pinball" if self.quantiles else self.loss_name
        losses = self.elementwise_loss(self(batch["series"]), batch["future"])
        return {f"loss_{name}": losses.mean()}

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the forecast of ``batch["series"]``; quantiles are sorted."""
        predicted = self(batch["series"])
        return predicted.sort(dim=-1).values if self.quantiles else predicted


def pinball(predicted: Tensor, truth: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Return max(q d, (q - 1) d) with d = truth - predicted: (B, T, V, Q) -> (B, T, V, Q).

    Source: Koenker and Bassett, "Regression Quantiles", Econometrica 1978.
    """
    levels = torch.tensor(quantiles, dtype=predicted.dtype, device=predicted.device)
    difference = truth.unsqueeze(-1) - predicted
    return torch.maximum(levels * difference, (levels - 1) * difference)
