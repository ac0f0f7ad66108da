"""Windows of a time series: look-back and horizon, scaled by the training split."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.files.values import check_option, refuse
from datamodules.series.table import Table, Values

Constant = Literal["error", "keep"]


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
        far = [
            f"{table.values[row, column]:g} in column {table.names[column]} at "
            f"{table.row_name(int(row))}"
            for row, column in np.argwhere(np.isinf(scaled))
        ]
        refuse(table.source, {"has values too far from the training rows; correct them": far})
        return scaled

    def undo(self, values: NDArray[Any], count: int) -> NDArray[Any]:
        """Return scaled values (..., count) of the first variables in the file's units."""
        return values * self.std[:count] + self.mean[:count]


def fit_scaling(table: Table, constant: Constant) -> Scaling:
    """Return mean and population standard deviation over a training split.

    Args:
        table: The training split; missing values do not count.
        constant: "error" refuses a constant column, "keep" scales it by 1, as scikit-learn does.

    Raises:
        ValueError: A column is constant or empty.
    """
    is_empty = np.isnan(table.values).all(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty columns
        mean, std = np.nanmean(table.values, axis=0), np.nanstd(table.values, axis=0)
    still = std <= 1e-12 * np.maximum(1.0, np.abs(mean))
    faults = {
        "has columns without a training value": is_empty,
        "has columns that are constant over the training rows and cannot be scaled (leave them out "
        "by data.targets=[...], or pass data.constant=keep)": still & (constant == "error"),
    }
    places = {
        rule: [table.names[column] for column in np.flatnonzero(columns)]
        for rule, columns in faults.items()
    }
    refuse(table.source, places)
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
    rows, shares = all(float(part) == int(part) for part in split), abs(sum(split) - 1) < 1e-6
    valid = len(split) == 3 and min(split) > 0 and (rows or shares)
    check_option("split", [*split], valid, "three positive shares that add up to 1, or rows")
    if rows:
        train, val, test = (int(part) for part in split)
    else:
        train, test = int(count * split[0]), int(count * split[2])
        val = count - train - test
    needs = f"three that need at most the table's {count} rows, not {train + val + test}"
    check_option("split", [*split], train + val + test <= count, needs)
    return train, val, test
