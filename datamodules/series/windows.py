"""Windows of a time series: look-back and horizon, scaled by the training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.series.table import Table, Values


@dataclass(frozen=True, eq=False)
class Scaling:
    """Mean and standard deviation of each variable over the training split."""

    mean: Values
    std: Values

    def apply(self, values: Values) -> Values:
        """Return values in units of standard deviations."""
        return (values - self.mean) / self.std

    def inputs(self, table: Table) -> NDArray[np.float32]:
        """Return a table's scaled values as a network reads them.

        Raises:
            ValueError: One is beyond float32.
        """
        with np.errstate(over="ignore"):
            scaled = self.apply(table.values).astype(np.float32)
        for row, column in np.argwhere(np.isinf(scaled))[:1]:
            raise ValueError(
                f"{table.source}: column {table.names[column]} at {table.row_name(int(row))} is "
                f"{table.values[row, column]:g}, too far from the training rows; correct it"
            )
        return scaled

    def undo(self, values: NDArray[Any], count: int) -> NDArray[Any]:
        """Return scaled values (..., count) of the first variables in the file's units."""
        return values * self.std[:count] + self.mean[:count]


def fit_scaling(table: Table, constant: str) -> Scaling:
    """Return mean and population standard deviation over a training split.

    Args:
        table: The training split; missing values do not count.
        constant: "error" refuses a constant column, "keep" scales it by 1, as scikit-learn does.

    Raises:
        ValueError: A column is constant or empty.
    """
    if constant not in ("error", "keep"):
        raise ValueError(f"data.constant must be error or keep; got {constant!r}")
    empty = np.isnan(table.values).all(axis=0)
    for column in np.flatnonzero(empty):
        raise ValueError(f"{table.source}: column {table.names[column]} has no training value")
    mean, std = np.nanmean(table.values, axis=0), np.nanstd(table.values, axis=0)
    still = std <= 1e-12 * np.maximum(1.0, np.abs(mean))
    if still.any() and constant == "error":
        names = ", ".join(table.names[column] for column in np.flatnonzero(still))
        raise ValueError(
            f"{table.source}: {names} is constant over the training rows and cannot be scaled; "
            "leave it out by data.targets=[...], or pass data.constant=keep"
        )
    return Scaling(mean, np.where(still, 1.0, std))


class Windows:
    """Pairs of a look-back (L, M) and the horizon after it (T, the target variables).

    Args:
        values: (n, M), scaled; targets first.
        usable: For each row whether a window may contain it.
        rows: Rows of the split, with the look-back of its first window.
        lookback: L.
        horizon: T.
        targets: Number of variables to predict.
    """

    def __init__(
        self, values: NDArray[np.float32], usable: NDArray[np.bool_], rows: range, *,
        lookback: int, horizon: int, targets: int,
    ) -> None:  # fmt: skip
        self.values = torch.from_numpy(values)
        self.lookback, self.horizon, self.targets = lookback, horizon, targets
        length = lookback + horizon
        starts = np.arange(rows.start, max(rows.start, rows.stop - length + 1))
        broken = np.concatenate([[0], np.cumsum(~usable)])
        self.starts = starts[broken[starts + length] == broken[starts]]

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``series`` (L, M), ``future`` (T, targets) and ``sample_id``."""
        start = int(self.starts[index])
        now = start + self.lookback
        return {
            "series": self.values[start:now],
            "future": self.values[now : now + self.horizon, : self.targets],
            "sample_id": torch.tensor(index),
        }


class LastWindows:
    """The last look-back of each of several tables, whose future is unknown."""

    def __init__(self, tables: Sequence[Table], scaling: Scaling, lookback: int) -> None:
        self.tables = [table.rows(slice(len(table) - lookback, None)) for table in tables]
        self.values = [torch.from_numpy(scaling.inputs(table)) for table in self.tables]

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self.tables)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``series`` (L, M) and ``sample_id``."""
        return {"series": self.values[index], "sample_id": torch.tensor(index)}


def split_rows(count: int, split: Sequence[float]) -> tuple[int, int, int]:
    """Return the rows of training, validation and test.

    Args:
        count: Rows of the table.
        split: Three numbers of rows, or three shares. Of shares, training and test are rounded down
            and validation gets the rest, as in the benchmarks.

    Raises:
        ValueError: The split is not three positive numbers, or needs more rows than there are.
    """
    if len(split) != 3 or min(split) <= 0:
        raise ValueError(f"data.split must be three positive numbers, got {list(split)}")
    if all(float(part) == int(part) for part in split):
        train, val, test = (int(part) for part in split)
    elif abs(sum(split) - 1) < 1e-6:
        train, test = int(count * split[0]), int(count * split[2])
        val = count - train - test
    else:
        raise ValueError(f"data.split={list(split)} must be shares that add up to 1, or rows")
    if train + val + test > count:
        raise ValueError(
            f"data.split={list(split)} needs {train + val + test} rows, but the table has {count}"
        )
    return train, val, test
