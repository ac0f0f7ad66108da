"""Read tables of time series: csv files with a column of time stamps and one per variable."""

from __future__ import annotations

import csv
import io
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datamodules.files.console import log
from datamodules.files.text_files import DELIMITERS, read_text

FORMATS = (
    "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d",
    "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d",
    "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y",
    "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y",
)  # fmt: skip
MISSING = frozenset(("", "na", "nan", "n/a", "null", "none"))
LONGEST_NUMBER = 18  # digits of a time stamp that is a whole number
SHOWN = 3  # places named in a message
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """Multivariate time series.

    Attributes:
        source: The file.
        times: Time stamps (n,), as datetime64 or whole numbers.
        names: Names of the variables.
        values: (n, M) in the file's units; NaN where the file lacks a value.
    """

    source: str
    times: NDArray[np.generic]
    names: tuple[str, ...]
    values: Values

    def __len__(self) -> int:
        return len(self.times)

    def rows(self, part: slice) -> Table:
        """Return some rows."""
        return Table(self.source, self.times[part], self.names, self.values[part])

    def step(self) -> np.generic:
        """Return the usual distance of two time stamps: the median."""
        return np.sort(np.diff(self.times))[(len(self.times) - 1) // 2]

    def row_name(self, row: int) -> str:
        """Return a time stamp as text."""
        return str(self.times[row]).replace("T", " ")


def read_table(
    path: Path,
    time_column: str,
    time_format: str | None = None,
    choose: Callable[[Sequence[str]], Sequence[str]] = tuple,
) -> Table:
    """Read a csv file; the first line names the columns.

    Args:
        path: The file, separated by commas, semicolons or tabs.
        time_column: Name of the column of time stamps.
        time_format: ``strptime`` format of the time stamps; None for ISO and common others.
        choose: Function from the names of all variables to those to read, in their order. Other
            columns may hold anything.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file lacks columns or rows, or a cell is not a number.
    """
    text = read_text(path)
    delimiter = max(DELIMITERS, key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    lines = ((reader.line_num, line) for line in reader if line)
    header = [name.strip() for _, line in itertools.islice(lines, 1) for name in line]
    _check_header(path, header, time_column)
    names = tuple(choose([name for name in header if name != time_column]))
    _check_names(path, names, header, time_column)
    place, places = header.index(time_column), [header.index(name) for name in names]
    stamps, rows = [], []
    for number, line in lines:
        if len(line) != len(header):
            raise ValueError(f"{path}, row {number}: {len(line)} cells instead of {len(header)}")
        stamps.append((number, line[place].strip()))
        rows.append(_read_row([line[one] for one in places], names, f"{path}, row {number}"))
    if not rows:
        raise ValueError(f"{path} holds no rows; expected a line of names and a line per time")
    return Table(str(path), _read_times(path, stamps, time_format), names, np.stack(rows))


def _check_header(path: Path, header: Sequence[str], time_column: str) -> None:
    if not header:
        raise ValueError(f"{path} is empty; expected a line of names and a line per time")
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


def _check_names(path: Path, names: Sequence[str], header: Sequence[str], time_column: str) -> None:
    absent = [name for name in names if name not in header or name == time_column]
    if absent:
        columns = ", ".join(name for name in header if name != time_column)
        raise ValueError(
            f"{path} lacks the column{'s' * (len(absent) > 1)} {', '.join(absent)}; its columns "
            f"are {columns}"
        )


def _read_times(
    path: Path, stamps: Sequence[tuple[int, str]], form: str | None
) -> NDArray[np.generic]:
    texts = [text for _, text in stamps]
    if form is None:
        if all(text.lstrip("-").isdigit() and len(text) <= LONGEST_NUMBER for text in texts):
            return np.array(texts, dtype=np.int64)
        try:
            return _read_iso_times(path, texts)
        except ValueError:
            form = next((one for one in FORMATS if _fits(texts[0], one)), None)
    for number, text in stamps:
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


def _read_iso_times(path: Path, texts: Sequence[str]) -> NDArray[np.generic]:
    with warnings.catch_warnings(record=True) as offsets:
        warnings.simplefilter("always")
        exact = np.array([text.removesuffix("Z") for text in texts], dtype="datetime64[us]")
    if np.isnat(exact).any():  # an empty cell
        raise ValueError(f"{path} has rows without a time stamp")
    if offsets:  # numpy converts them
        log(f"{path}: time stamps with an offset are converted to UTC")
    times = exact.astype("datetime64[s]")
    return times if (times == exact).all() else exact


def _read_row(cells: Sequence[str], names: Sequence[str], where: str) -> Values:
    try:
        values = np.array(cells, dtype=np.float64)
    except ValueError:
        pairs = zip(cells, names, strict=True)
        values = np.array([_number(cell, name, where) for cell, name in pairs])
    values[~np.isfinite(values)] = math.nan
    return values


def _number(cell: str, name: str, where: str) -> float:
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{where}, column {name}: {cell!r} is not a number; leave the column out by "
            "data.targets=[...], or correct the cell"
        ) from None
