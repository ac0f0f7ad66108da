"""Forecasting of multivariate time series, by mean squared and absolute error."""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn

from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from tasks.engine.base import BaseTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.forecasting.errors import ForecastErrors, point_forecast
from tasks.forecasting.family import FAMILY
from tasks.forecasting.pictures import Forecast, draw

log_info = rank_zero_only(logging.getLogger(__name__).info)
ONECYCLE_RATE, ONECYCLE_BETAS = 1 / 25, (0.95, 0.999)  # torch's OneCycleLR before its first step
WHOLE = "forecaster."  # the layer to the horizon in files of a whole network
FACTS = "series"  # entry of a checkpoint: variables, scaling, horizon
SHOWN_PARTS = 6  # parts of the horizon in the closing table


class ForecastingTask(BaseTask):
    """Forecasts of scaled series; errors are means over all elements of the test windows.

    Args:
        model: See ``BaseTask``.
        onecycle_side_effect: Train the first epoch at 1/25 of the rate and set Adam's beta1 to
            0.95, as the code of FFNet's authors does by a schedule that it never steps.
        **options: Options of ``BaseTask``.
    """

    family = FAMILY
    metric_stores = ("errors",)
    preview_images = 4
    figures_file = "horizon.csv"

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
        onecycle_side_effect: bool = False,
    ) -> None:
        if onecycle_side_effect:
            optimizer = {**(optimizer or {}), "betas": ONECYCLE_BETAS}
        super().__init__(model, optimizer=optimizer, schedule=schedule, ema=ema)
        self.onecycle_side_effect = onecycle_side_effect
        self.errors = ForecastErrors(self.model.horizon, self.model.quantiles)
        self.series_facts: dict[str, Any] = {}

    @property
    def headline(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of the metrics: errors, and those of quantiles."""
        return ("mse", "mae", *(("pinball", "coverage") if self.model.quantiles else ()))

    def schedule_factor(
        self, steps: int, steps_per_epoch: int, lr: float
    ) -> Callable[[int], float]:
        """Return the rate of each step over the top rate."""
        usual = super().schedule_factor(steps, steps_per_epoch, lr)
        if not self.onecycle_side_effect:
            return usual
        return lambda step: ONECYCLE_RATE if step < steps_per_epoch else usual(step)

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Add the errors of a batch."""
        self.errors.update(predictions, batch["future"])

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return the mean squared error of each window (B,)."""
        forecast = point_forecast(predictions.double(), self.errors.quantiles)
        return (forecast - batch["future"]).square().mean(dim=(1, 2))

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the means over all elements; those of each step become ``class_figures``."""
        means = self.errors.compute()
        figures = {name: value.mean().float() for name, value in means.items()}
        if self.errors.count and not all(figure.isfinite() for figure in figures.values()):
            raise ValueError(
                "errors of the forecasts are not finite: a value of the data is too large for the "
                "network, or its training diverged"
            )
        self.class_figures = [
            {"step": str(step + 1), **{name: float(value[step]) for name, value in means.items()}}
            for step in range(self.model.horizon)
        ]
        return figures

    def shown_figures(self, mode: str) -> list[Row]:
        """Return the metrics of parts of the horizon."""
        rows, parts = self.class_figures, min(SHOWN_PARTS, len(self.class_figures))
        ends = [len(rows) * (part + 1) // parts for part in range(parts)]
        table = []
        for begin, end in zip([0, *ends], ends, strict=False):
            part, names = rows[begin:end], list(rows[0])[1:]
            means = {name: sum(row[name] for row in part) / len(part) for name in names}
            label = f"{begin + 1}-{end}" if end > begin + 1 else str(end)
            table.append({"steps of the horizon": label, **means})
        return table

    def reset_metrics(self) -> None:
        """Reset the sums."""
        self.errors.reset()

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the summed loss and the number of elements."""
        elements = torch.tensor(batch["future"].numel(), device=predictions.device)
        losses = self.model.elementwise_loss(predictions, batch["future"])
        return losses.double().sum(), elements

    def take_targets(self, datamodule: Any) -> None:
        """Copy names and scaling of the variables."""
        self.series_facts = datamodule.facts()

    def target_arguments(self) -> dict[str, Any]:
        """Return names and scaling of the variables."""
        return self.series_facts

    def target_state(self) -> dict[str, Any]:
        """Return names, scaling and horizon for a checkpoint."""
        return {FACTS: {**self.series_facts, "horizon": self.model.horizon}}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return a checkpoint's names and scaling; None if the file lacks them."""
        return checkpoint.values.get(FACTS)

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another horizon or of another number of variables."""
        facts = checkpoint.values.get(FACTS)
        if facts is None:
            return
        if facts["horizon"] != self.model.horizon:
            raise ValueError(
                f"{checkpoint.path} predicts {facts['horizon']} steps, but data.horizon="
                f"{self.model.horizon}; pass data.horizon={facts['horizon']}"
            )
        if facts["targets"] != self.model.targets:
            raise ValueError(
                f"{checkpoint.path} predicts {facts['targets']} variables "
                f"({', '.join(facts['names'][: facts['targets']])}), but the data have "
                f"{self.model.targets}; pass data.targets=[...]"
            )

        step, spacing = facts.get("step"), self.series_facts.get("step")
        if step and spacing and step != spacing:
            log_info(f"{checkpoint.path} was trained on steps of {step}; the data's are {spacing}")

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load as ``BaseTask`` does, and files of FFNet's authors that hold the whole network."""
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        if self.model.backbone.is_official(opened.tensors):
            state_dict = self.model.backbone.convert_state_dict(dict(opened.state_dict))
            tensors = {
                key if key.startswith(WHOLE) else f"backbone.{key}": value
                for key, value in state_dict.items()
            }
            opened = dataclasses.replace(opened, weights=tensors)
        super().load_weights(opened, converted=converted)

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per series ``input``, its name, ``times``, and ``forecast`` by variable.

        Times are in the file's format, values in its units; ``time_column`` names the times. With
        quantiles there are also ``quantiles``, by variable and level.
        """
        return [{"input": item.name, **item.plain()} for item in self._forecasts(batch, datamodule)]

    def _forecasts(self, batch: Batch, datamodule: Any) -> list[Forecast]:
        predicted = self.model.predict(batch).double().cpu()
        samples = batch["sample_id"].tolist()
        names = input_names(batch, datamodule, self.family.modality)
        count, scaling = self.model.targets, datamodule.scaling
        forecasts = []
        for index, (sample, name) in enumerate(zip(samples, names, strict=True)):
            point = point_forecast(predicted[index], self.model.quantiles)
            levels = predicted[index].movedim(-1, 0) if self.model.quantiles else ()
            truth = batch["future"][index].double().cpu() if "future" in batch else None
            forecasts.append(
                Forecast(
                    name=name,
                    past=datamodule.predicted_table(sample),
                    names=tuple(datamodule.target_names),
                    values=scaling.undo(point.numpy(), count),
                    truth=None if truth is None else scaling.undo(truth.numpy(), count),
                    quantiles={
                        level: scaling.undo(values.numpy(), count)
                        for level, values in zip(self.model.quantiles, levels, strict=True)
                    },
                )
            )
        return forecasts

    def answer(self, row: Row) -> str:
        """Return the period and the first and last values of the first variable."""
        name, values = next(iter(row["forecast"].items()))
        times = row["times"]
        more = f" and {len(row['forecast']) - 1} more variables" * (len(row["forecast"]) > 1)
        return f"{times[0]} to {times[-1]}: {name} {values[0]:.4g} to {values[-1]:.4g}{more}"

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write each forecast as a csv file in the format of the data."""
        for row in rows:
            name = f"{Path(row['input']).stem}_forecast.csv" if len(rows) > 1 else "forecast.csv"
            write_whole(folder / name, to_csv(row))

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw past, forecast and, if known, truth of some variables of each series."""
        return [draw(forecast) for forecast in self._forecasts(batch, datamodule)]


def to_csv(row: Row) -> str:
    """Return a forecast as csv: a column of time stamps and one per variable and quantile."""
    columns: dict[str, Sequence[Any]] = {row["time_column"]: row["times"]}
    columns |= row["forecast"]
    for name, levels in row.get("quantiles", {}).items():
        columns |= {f"{name}_q{level}": values for level, values in levels.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()
