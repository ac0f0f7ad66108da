"""Simple forecasts that every network has to beat: last value, seasonal naive, NLinear, DLinear.

They lack slots. Their map is the series itself, and their forecaster does the work.

Source: Zeng et al., "Are Transformers Effective for Time Series Forecasting?", AAAI 2023,
https://arxiv.org/abs/2205.13504 (NLinear and DLinear, Sec. 4 and Fig. 2); Hyndman and
Athanasopoulos, "Forecasting: Principles and Practice", Sec. 5.2 (naive methods).

Axes: B series, L look-back, M variables, T horizon.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import FeatureInfo
from backbones.hosts.scaffolds.series import LOOKBACK, FlatLinear, Normalisation, SeriesBackbone
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.bounds import check_range
from backbones.options.values import check_odd
from backbones.registry import register_host
from backbones.slots import HostConfig

MOVING_AVERAGE = 25  # steps of DLinear's trend
Start = Literal["random", "mean"]


class SeriesMap(SeriesBackbone):
    """The series as a map: (B, L, M) -> (B, 1, M, L).

    Args:
        config: See ``HostConfig``.
        normalisation: What the method takes out of each series.
    """

    token_slots = channel_slots = ()
    any_variables = True
    num_features = 1

    def __init__(self, config: HostConfig, normalisation: Normalisation) -> None:
        super().__init__()
        self.img_size, self.normalisation = config.img_size, normalisation
        self.feature_info = (FeatureInfo(self.num_features, 1),)

    def block_names(self) -> tuple[str, ...]:
        """Return an empty tuple, as the host lacks blocks."""
        return ()

    def last_map(self, series: Tensor) -> Tensor:
        """Return the series as rows: (B, L, M) -> (B, 1, M, L)."""
        return series.transpose(1, 2).unsqueeze(1)


class Repeat(nn.Module):
    """The last ``period`` values of each variable, again and again: (B, 1, M, L) -> (B, M, T)."""

    def __init__(self, period: int, horizon: int) -> None:
        super().__init__()
        # A buffer, so that checkpoints hold something.
        self.register_buffer("places", torch.arange(horizon) % period - period)
        self.places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Repeat the last values: (B, 1, M, L) -> (B, M, T)."""
        return x[:, 0, :, self.places]


class Naive(SeriesMap):
    """Repetition of the last ``period`` values; nothing is trained."""

    def __init__(self, config: HostConfig, period: int) -> None:
        super().__init__(config, "none")
        check_range("backbone.period", period, 1, config.img_size[1])
        self.period = period

    def forecaster(self, horizon: int, drop: float = 0.0) -> nn.Module:
        """Build the repetition."""
        return Repeat(self.period, horizon)


class Decomposition(SeriesMap):
    """DLinear's two maps: the rest and the trend, a moving average with repeated ends.

    Shape: (B, L, M) -> (B, 2, M, L).
    """

    num_features = 2

    def __init__(self, config: HostConfig, kernel_size: int, start: Start) -> None:
        super().__init__(config, "none")
        check_odd(kernel_size)
        self.kernel_size, self.start = kernel_size, start

    def last_map(self, series: Tensor) -> Tensor:
        """Return rest and trend: (B, L, M) -> (B, 2, M, L)."""
        rows, side = series.transpose(1, 2), self.kernel_size // 2
        trend = F.avg_pool1d(F.pad(rows, (side, side), mode="replicate"), self.kernel_size, 1)
        return torch.stack([rows - trend, trend], dim=1)

    def forecaster(self, horizon: int, drop: float = 0.0) -> nn.Module:
        """Build one linear layer for the rest and one for the trend."""
        return TwoLinear(self.img_size[1], horizon, self.start)


class TwoLinear(nn.Module):
    """The sum of a linear layer of the rest and one of the trend: (B, 2, M, L) -> (B, M, T)."""

    def __init__(self, lookback: int, horizon: int, start: Start) -> None:
        super().__init__()
        self.seasonal, self.trend = (nn.Linear(lookback, horizon) for _ in range(2))
        if start == "mean":
            for layer in (self.seasonal, self.trend):
                nn.init.constant_(layer.weight, 1 / lookback)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both forecasts: (B, 2, M, L) -> (B, M, T)."""
        return self.seasonal(x[:, 0]) + self.trend(x[:, 1])


class NLinear(SeriesMap):
    """One linear layer over time on the series less its last value, shared by the variables."""

    def forecaster(self, horizon: int, drop: float = 0.0) -> nn.Module:
        """Build the linear layer."""
        return FlatLinear(self.img_size[1], horizon, drop)


@register_host(
    "last_value", slots=(), source="Hyndman and Athanasopoulos, Sec. 5.2", patch_size=1,
    modality="series", img_size=LOOKBACK,
)  # fmt: skip
def last_value(config: HostConfig) -> Naive:
    """Repeat the last value."""
    refuse_pretrained("last_value", config)
    return Naive(config, 1)


@register_host(
    "seasonal_naive", slots=(), source="Hyndman and Athanasopoulos, Sec. 5.2", patch_size=1,
    modality="series", img_size=LOOKBACK,
)  # fmt: skip
def seasonal_naive(config: HostConfig, *, period: int = 24) -> Naive:
    """Repeat the last season.

    Args:
        config: See ``HostConfig``.
        period: Steps of a season.
    """
    refuse_pretrained("seasonal_naive", config)
    return Naive(config, period)


@register_host(
    "nlinear", slots=(), source="Zeng et al., AAAI 2023, Sec. 4", patch_size=1, modality="series",
    img_size=LOOKBACK,
)  # fmt: skip
def nlinear(config: HostConfig) -> NLinear:
    """Take the last value out, one linear layer, put it back."""
    refuse_pretrained("nlinear", config)
    return NLinear(config, "last")


@register_host(
    "dlinear", slots=(), source="Zeng et al., AAAI 2023, Sec. 4 and Fig. 2", patch_size=1,
    modality="series", img_size=LOOKBACK,
)  # fmt: skip
def dlinear(
    config: HostConfig, *, kernel_size: int = MOVING_AVERAGE, start: Start = "random"
) -> Decomposition:
    """Sum a linear layer of the trend and one of the rest.

    Args:
        config: See ``HostConfig``.
        kernel_size: Steps of the moving average, odd.
        start: First weights of both layers: "random", as in the authors' code, or "mean", 1 / L
            each, as in Time-Series-Library, so that the first forecast is the mean of the series.
    """
    refuse_pretrained("dlinear", config)
    return Decomposition(config, kernel_size, start)
