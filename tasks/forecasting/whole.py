"""A forecaster as one graph: series in the units of their files to forecasts in them.

Values are in double precision, in which the data are scaled; the network computes in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.graphs import BATCH, WholeGraph, distance


class WholeForecaster(WholeGraph):
    """Scaling, network, sorted quantiles and the scaling back.

    Shape: (B, L, M) -> (B, T, V), or (B, T, V, Q) with quantiles.
    """

    inputs = ("series",)
    outputs = ("forecast",)
    script = Path(__file__).with_name("infer.py")
    axes = (BATCH,)
    point = None

    mean: Tensor
    std: Tensor

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        for name in ("mean", "std"):
            values = torch.tensor(task.series_facts[name], dtype=torch.float64)
            self.register_buffer(name, values, persistent=False)

    def forward(self, series: Tensor) -> Tensor:
        """Forecast series (B, L, M)."""
        scaled = ((series - self.mean) / self.std).float()
        forecast = self.network.predict({"series": scaled}).double()
        return forecast * self._column(self.std, forecast) + self._column(self.mean, forecast)

    def _column(self, values: Tensor, forecast: Tensor) -> Tensor:
        """Return the values of the predicted variables, which are the first ones."""
        values = values[: forecast.shape[2]]
        return values if forecast.ndim == 3 else values[:, None]

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the series in the units of their file."""
        return (batch["series"].double() * self.std + self.mean,)

    def predictions(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the scaled forecast."""
        shift, width = (self._column(values, predicted) for values in (self.mean, self.std))
        return ((answers[0] - shift) / width).float()

    def differences(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the differences in standard deviations."""
        return distance(predicted, self.predictions(predicted, answers))

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the variables, their scaling, and the lengths of look-back and horizon."""
        return {
            **task.series_facts,
            "horizon": self.network.horizon,
            "lookback": task.data.lookback,
            "quantiles": list(self.network.quantiles),
        }
