"""The eight long-term forecasting sets, as the files of Informer and Autoformer hold them.

Source: splits of Zhou et al., "Informer", AAAI 2021 (ETT: months of 30 days), and Wu et al.,
"Autoformer", NeurIPS 2021 (shares of 0.7, 0.1 and 0.2); sizes in Table 11 of FFNet
(https://arxiv.org/abs/2406.02021). The benchmarks take rows as steps and do not look at their time
stamps (Weather lacks some), and scale a constant column by 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from datamodules.series.base import SeriesDataModule
from datamodules.series.gaps import Gaps
from datamodules.series.windows import Constant

MONTH = 30 * 24  # hours
HOURS = (12 * MONTH, 4 * MONTH, 4 * MONTH)
QUARTERS = tuple(4 * hours for hours in HOURS)
SHARES = (0.7, 0.1, 0.2)


class BenchmarkDataModule(SeriesDataModule):
    """Base of the sets: their file, split and number of variables.

    Attributes:
        usual_split: Rows or shares of training, validation and test.
        variables: Number of variables M of the published file.

    Args:
        root: Folder of the file, or the file itself.
        file: Another name of the file.
        split: Another split than the published one.
        gaps: See ``gaps.close_gaps``.
        constant: See ``windows.fit_scaling``.
        **options: Of ``SeriesDataModule``.
    """

    usual_split: ClassVar[tuple[float, ...]] = SHARES
    variables: ClassVar[int]

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        file: str | None = None,
        split: Sequence[float] | None = None,
        gaps: Gaps = "ignore",
        constant: Constant = "keep",
        **options: Any,
    ) -> None:
        super().__init__(
            root,
            file=file or self.usual_file,
            split=split or self.usual_split,
            gaps=gaps,
            constant=constant,
            **options,
        )

    @property
    @abstractmethod
    def usual_file(self) -> str:
        """Name of the file."""


class ETTh1DataModule(BenchmarkDataModule):
    """ETTh1: oil temperature and six loads of a transformer, every hour."""

    layout, example = "ETTh1.csv", "data=etth1 data.root=/data/ETT-small"
    usual_file, usual_split, variables = "ETTh1.csv", HOURS, 7


class ETTh2DataModule(BenchmarkDataModule):
    """ETTh2: oil temperature and six loads of another transformer, every hour."""

    layout, example = "ETTh2.csv", "data=etth2 data.root=/data/ETT-small"
    usual_file, usual_split, variables = "ETTh2.csv", HOURS, 7


class ETTm1DataModule(BenchmarkDataModule):
    """ETTm1: the transformer of ETTh1, every 15 minutes."""

    layout, example = "ETTm1.csv", "data=ettm1 data.root=/data/ETT-small"
    usual_file, usual_split, variables = "ETTm1.csv", QUARTERS, 7


class ETTm2DataModule(BenchmarkDataModule):
    """ETTm2: the transformer of ETTh2, every 15 minutes."""

    layout, example = "ETTm2.csv", "data=ettm2 data.root=/data/ETT-small"
    usual_file, usual_split, variables = "ETTm2.csv", QUARTERS, 7


class WeatherDataModule(BenchmarkDataModule):
    """Weather: 21 measurements in Jena, every 10 minutes."""

    layout, example = "weather.csv", "data=weather data.root=/data/weather"
    usual_file, variables = "weather.csv", 21


class ECLDataModule(BenchmarkDataModule):
    """ECL: electricity consumption of 321 clients, every hour."""

    layout, example = "electricity.csv", "data=ecl data.root=/data/electricity"
    usual_file, variables = "electricity.csv", 321


class TrafficDataModule(BenchmarkDataModule):
    """Traffic: occupancy of 862 roads, every hour."""

    layout, example = "traffic.csv", "data=traffic data.root=/data/traffic"
    usual_file, variables = "traffic.csv", 862


class ExchangeDataModule(BenchmarkDataModule):
    """Exchange: daily rates of 8 currencies."""

    layout, example = "exchange_rate.csv", "data=exchange data.root=/data/exchange_rate"
    usual_file, variables = "exchange_rate.csv", 8
