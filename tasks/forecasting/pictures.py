"""Pictures of forecasts: past, forecast and truth as curves."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tasks.engine.figures import load_pyplot

Values = NDArray[np.float64]
MOST = 4  # variables of a picture
DIGITS = 6  # significant ones of written values


@dataclass(frozen=True, eq=False)
class Forecast:
    """Forecast of a series in its own units.

    Attributes:
        name: Name of the series.
        past: Table of the look-back, with ``times``, ``names``, ``values`` (L, M), ``stamps``.
        names: Names of the predicted variables.
        values: (T, V).
        truth: (T, V), if known.
        quantiles: (T, V) by level.
    """

    name: str
    past: Any
    names: tuple[str, ...]
    values: Values
    truth: Values | None = None
    quantiles: Mapping[float, Values] = field(default_factory=dict)

    @property
    def times(self) -> NDArray[Any]:
        """Time stamps of the forecast (T,)."""
        times: NDArray[Any] = self.past.stamps.after(self.past.times[-1], len(self.values))
        return times

    def plain(self) -> dict[str, Any]:
        """Return time stamps, as the file writes them, and values as lists."""
        entry: dict[str, Any] = {
            "time_column": self.past.stamps.column,
            "times": self.past.stamps.texts(self.times),
            "forecast": _by_name(self.names, self.values),
        }
        if self.quantiles:
            by_level = {
                level: _by_name(self.names, values) for level, values in self.quantiles.items()
            }
            entry["quantiles"] = {
                name: {f"{level:g}": by_level[level][name] for level in by_level}
                for name in self.names
            }
        return entry


def _by_name(names: tuple[str, ...], values: Values) -> dict[str, list[float]]:
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in column]
        for name, column in zip(names, values.T, strict=True)
    }


def draw(forecast: Forecast) -> Image.Image:
    """Draw the first and last variables, each with past, truth, forecast and outer quantiles."""
    from matplotlib import dates

    plt = load_pyplot()

    count = len(forecast.names)
    indices = range(count) if count <= MOST else [*range(MOST - 1), count - 1]
    figure, axes = plt.subplots(
        len(indices), 1, figsize=(9, 0.8 + 1.7 * len(indices)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    times = forecast.times
    for axis, index in zip(axes[:, 0], indices, strict=True):
        name = forecast.names[index]
        past = forecast.past.values[:, forecast.past.names.index(name)]
        axis.plot(forecast.past.dates(), past, color="0.45", label="past", linewidth=1)
        if forecast.truth is not None:
            axis.plot(times, forecast.truth[:, index], color="black", label="truth", linewidth=1)
        axis.plot(
            times, forecast.values[:, index], color="tab:orange", label="forecast", linewidth=1.4
        )
        if len(forecast.quantiles) > 1:
            low, high = min(forecast.quantiles), max(forecast.quantiles)
            axis.fill_between(
                times, forecast.quantiles[low][:, index], forecast.quantiles[high][:, index],
                color="tab:orange", alpha=0.25, linewidth=0, label=f"{low:g} to {high:g}",
            )  # fmt: skip
        axis.set_ylabel(name)
        axis.margins(x=0.01)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)
    if np.issubdtype(times.dtype, np.datetime64):
        untyped: Any = dates
        places = untyped.AutoDateLocator(maxticks=10)
        axes[-1, 0].xaxis.set_major_locator(places)
        axes[-1, 0].xaxis.set_major_formatter(untyped.ConciseDateFormatter(places))
    axes[0, 0].set_title(_short_name(forecast.name), fontsize=9, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    plt.close(figure)
    return Image.open(buffer).convert("RGB")


def _short_name(name: str) -> str:
    """Return the name of a series without the folders of its file."""
    return name.rpartition("/")[2]
