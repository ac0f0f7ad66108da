"""Read tables of time series: csv files with a column of time stamps and one per variable."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datamodules.files.text_files import DELIMITERS, read_text

FORMATS = (
    "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M",
    "%d.%m.%Y", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y",
)  # fmt: skip
MISSING = frozenset(("", "na", "nan", "n/a", "null", "none"))
SHOWN = 3  # places named in a message
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """Multivariate time series.

    Attributes:
        source: The file.
        times: Time stamps (n,), as datetime64 or whole numbers.
        names: Names of the variables.
        values: (n, M) in the file's units; NaN where the file has none.
    """

    source: str
    times: NDArray[np.generic]
    names: tuple[str, ...]
    values: Values

    def __len__(self) -> int:
        return len(self.times)

    def select(self, names: Sequence[str]) -> Table:
        """Return the table of some variables, in this order.

        Raises:
            ValueError: A column is missing; the message lists those of the file.
        """
        absent = [name for name in names if name not in self.names]
        if absent:
            raise ValueError(
                f"{self.source} lacks the column{'s' * (len(absent) > 1)} {', '.join(absent)}; "
                f"its columns are {', '.join(self.names)}"
            )
        columns = [self.names.index(name) for name in names]
        return Table(self.source, self.times, tuple(names), self.values[:, columns])

    def rows(self, part: slice) -> Table:
        """Return some rows."""
        return Table(self.source, self.times[part], self.names, self.values[part])

    def step(self) -> np.generic:
        """Return the usual distance of two time stamps: the median."""
        return np.sort(np.diff(self.times))[(len(self.times) - 1) // 2]

    def row_name(self, row: int) -> str:
        """Return a time stamp as text."""
        return str(self.times[row]).replace("T", " ")


def read_table(path: Path, time_column: str, time_format: str | None = None) -> Table:
    """Read a csv file; the first line names the columns.

    Args:
        path: The file, separated by commas, semicolons or tabs.
        time_column: Name of the column of time stamps.
        time_format: ``strptime`` format of the time stamps; None for ISO and common others.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file lacks columns or rows, or a cell is not a number.
    """
    text = read_text(path)
    first = text.partition("\n")[0]
    delimiter = max(DELIMITERS, key=first.count)
    lines = [line for line in csv.reader(io.StringIO(text), delimiter=delimiter) if line]
    if len(lines) < 2:
        raise ValueError(f"{path} holds no rows; expected a line of names and a line per time")
    header = [name.strip() for name in lines[0]]
    _check_header(path, header, time_column)
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise ValueError(f"{path}, row {number}: {len(line)} cells instead of {len(header)}")
    place = header.index(time_column)
    names = [name for name in header if name != time_column]
    times = _read_times(path, [line[place].strip() for line in lines[1:]], time_format)
    cells = [[cell for index, cell in enumerate(line) if index != place] for line in lines[1:]]
    return Table(str(path), times, tuple(names), _read_values(path, names, cells))


def _check_header(path: Path, header: Sequence[str], time_column: str) -> None:
    if time_column not in header:
        raise ValueError(
            f"{path} lacks the time column {time_column!r}; its columns are {', '.join(header)}: "
            "pass data.time_column=<name>"
        )
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise ValueError(f"{path} has several columns named {', '.join(doubled)}; rename them")
    if len(header) < 2:
        raise ValueError(f"{path} holds {time_column} only; add a column per variable")


def _read_times(path: Path, texts: Sequence[str], form: str | None) -> NDArray[np.generic]:
    if form is None:
        if all(text.lstrip("-").isdigit() and len(text) < 12 for text in texts):
            return np.array(texts, dtype=np.int64)
        try:
            return np.array([text.removesuffix("Z") for text in texts], dtype="datetime64[s]")
        except ValueError:
            form = next((one for one in FORMATS if _fits(texts[0], one)), None)
    for number, text in enumerate(texts, start=2):
        if form is None or not _fits(text, form):
            raise ValueError(
                f"{path}, row {number}: {text!r} is not a time stamp; write 2024-01-31 13:00:00, "
                "or pass data.time_format, such as '%d.%m.%Y %H:%M'"
            )
    assert form is not None
    return np.array([datetime.strptime(text, form) for text in texts], dtype="datetime64[s]")


def _fits(text: str, form: str) -> bool:
    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def _read_values(path: Path, names: Sequence[str], cells: Sequence[Sequence[str]]) -> Values:
    try:
        values = np.array(cells, dtype=np.float64)
    except ValueError:
        values = np.array(
            [
                [_number(cell, path, row, name) for cell, name in zip(line, names, strict=True)]
                for row, line in enumerate(cells, start=2)
            ]
        )
    values[~np.isfinite(values)] = math.nan
    return values


def _number(cell: str, path: Path, row: int, name: str) -> float:
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{path}, row {row}, column {name}: {cell!r} is not a number; leave the column out by "
            "data.targets=[...], or correct the cell"
        ) from None
