"""A generated multivariate series in ETT's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import check_minimum
from datamodules.files.cache import cache_root
from datamodules.sample.base import SampleDataModule
from datamodules.series.base import SeriesDataModule

NAMES = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")  # columns of the ETT files
FILE = "sample.csv"
DAY, WEEK = 24, 168  # hours
LAGS = (6, 24, 36)  # hours by which OT follows three of the loads
START = np.datetime64("2024-01-01T00:00:00")


class SampleForecasting(SampleDataModule, SeriesDataModule):
    """Six loads with seasonalities, trends and shocks, and a temperature that follows three.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        hours: Rows of the file.
        sample_seed: Seed of the generated data.
        options: Options of ``SeriesDataModule``.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        hours: int = 2400,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.hours = check_minimum("hours", hours, 10)
        self.sample_seed = check_minimum("sample_seed", sample_seed, 0)
        self.set_name = f"forecasting-{hours}h-seed{sample_seed}"

    def write(self, folder: Path) -> None:
        """Write the csv file."""
        write_series(folder / FILE, self.hours, self.sample_seed)


def write_series(file: Path, hours: int, seed: int) -> None:
    """Write a series of ``hours`` rows in ETT's format."""
    values = make_series(hours, seed)
    times: Any = START + np.arange(hours) * np.timedelta64(3600, "s")
    lines = [",".join(("date", *NAMES))]
    rows: Any = values.tolist()
    for time, row in zip(times, rows, strict=True):
        cells = (f"{value:.4f}" for value in row)
        lines.append(",".join((str(time).replace("T", " "), *cells)))
    file.write_text("\n".join(lines) + "\n")


def make_series(hours: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return (hours, 7): six loads, and OT, a sum of past values of three of them.

    A load is a daily and a weekly cycle with a harmonic, a slow trend, shocks that decay over half
    a day, and noise.
    """
    generator = np.random.default_rng(seed)
    longest = max(LAGS)
    time = np.arange(hours + longest)
    loads = []
    for _ in NAMES[:-1]:
        phases = generator.uniform(0, 2 * np.pi, 3)
        daily = np.sin(2 * np.pi * time / DAY + phases[0])
        daily += 0.4 * np.sin(4 * np.pi * time / DAY + phases[1])
        weekly = 0.6 * np.sin(2 * np.pi * time / WEEK + phases[2])
        trend = np.cumsum(generator.normal(0, 0.006, len(time)))
        shocks = generator.normal(0, 0.35, len(time)) * (generator.random(len(time)) < 0.2)
        slow = np.convolve(shocks, 0.94 ** np.arange(48))[: len(time)]
        noise = generator.normal(0, 0.1, len(time))
        loads.append(3 + generator.uniform(1, 3) * (daily + weekly + trend + slow + noise))
    past = np.stack(loads, axis=1)
    followed = [past[longest - lag : len(time) - lag, index] for index, lag in enumerate(LAGS)]
    target = 15 + 2.0 * sum(load - load.mean() for load in followed)
    target += generator.normal(0, 0.3, hours)
    return np.column_stack([past[longest:], target])
