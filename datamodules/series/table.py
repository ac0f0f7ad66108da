"""Read tables of time series: csv files with a column of time stamps and one per variable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datamodules.files.text_files import column_names, csv_rows, finite_number, read_text
from datamodules.files.values import refuse
from datamodules.series.stamps import Stamps, Times, read_stamps

MISSING = frozenset(("", "na", "nan", "n/a", "#n/a", "<na>", "null", "none", "?"))
INFINITE = frozenset(("inf", "-inf", "+inf", "infinity", "-infinity"))
LARGEST = float(np.finfo(np.float32).max)
HINTS = (
    (re.compile(r"-?\d+,\d+"), "write decimals with a point"),
    (re.compile(r"-?\d{1,3}(,\d{3})+\.\d*"), "write thousands without commas"),
    (re.compile(r"[-\d.]+[eE]\+?\d+|\d+"), "choose a unit in which float32 holds it"),
    (re.compile(r"\d{1,2}:\d\d(:\d\d)?"), "write date and time of day into one column"),
)
OTHER_CELL = "write a column per series if it names the series of its row, else correct the cell"
SHOWN = 3  # places named in a message
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """Multivariate time series.

    Attributes:
        source: The file.
        times: Time stamps (n,), as datetime64 or whole numbers; datetime64[M] if steps are months.
        names: Names of the variables.
        values: (n, M) in the file's units; NaN where the file lacks a value.
        stamps: How the file writes times, and how they go on.
    """

    source: str
    times: Times
    names: tuple[str, ...]
    values: Values
    stamps: Stamps

    def __len__(self) -> int:
        return len(self.times)

    def rows(self, part: slice) -> Table:
        """Return some rows."""
        return replace(self, times=self.times[part], values=self.values[part])

    def dates(self) -> Times:
        """Return the time stamps (n,) as dates or numbers."""
        return self.stamps.plain(self.times)

    def row_name(self, row: int) -> str:
        """Return a time stamp as text."""
        return str(self.stamps.plain(self.times[row : row + 1])[0]).replace("T", " ")


def read_table(
    source: Path | tuple[str, str],
    time_column: str,
    time_format: str | None = None,
    choose: Callable[[Sequence[str]], Sequence[str]] = tuple,
    usual_format: str = "",
) -> Table:
    """Read a csv file; the first line names the columns.

    Args:
        source: The file, separated by commas, semicolons or tabs; or a name and the content.
        time_column: Name of the column of time stamps.
        time_format: ``strptime`` format of the time stamps; None for ISO and common others.
        choose: Function from the names of all variables to those to read, in their order. Other
            columns may hold anything.
        usual_format: Format that is preferred where several fit.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file lacks columns or rows, or a cell is not a number.
    """
    path, text = source if isinstance(source, tuple) else (str(source), read_text(source))
    lines = csv_rows(text, path)
    header = column_names(next(lines, (0, []))[1], path)
    columns = ", ".join(header)
    faults = {
        "is empty; expected a line of names and a line per time": not header,
        f"lacks the time column {time_column!r}; its columns are {columns}: pass "
        "data.time_column=<name>": time_column not in header,
        f"holds {time_column} only; add a column per variable": len(header) < 2,
    }
    refuse(path, faults)
    variables = [name for name in header if name != time_column]
    names = tuple(choose(variables))
    lack = f"has the columns {', '.join(variables)} and lacks"
    refuse(path, {lack: [name for name in names if name not in variables]})
    place, places = header.index(time_column), [header.index(name) for name in names]
    cells, rows = [], []
    for number, line in lines:
        cells.append((number, line[place].strip()))
        rows.append(_read_row([line[column] for column in places], names, f"{path}, row {number}"))
    refuse(path, {"holds no rows; expected a line of names and a line per time": not rows})
    times, stamps = read_stamps(path, cells, time_column, time_format, usual_format)
    return Table(path, times, names, np.stack(rows), stamps)


def _read_row(cells: Sequence[str], names: Sequence[str], where: str) -> Values:
    try:
        values = np.array(cells, dtype=np.float64)
    except ValueError:
        pass
    else:
        if (np.abs(values) <= LARGEST).all() and "_" not in "".join(cells):
            return values
    return np.array([_number(*pair, where) for pair in zip(cells, names, strict=True)])


def _number(cell: str, name: str, where: str) -> float:
    text = cell.strip()
    if text.lower() in MISSING | INFINITE:
        return math.nan
    try:
        value = finite_number(text)
    except ValueError:
        value = math.inf
    if abs(value) > LARGEST:
        remedy = next((hint for form, hint in HINTS if form.fullmatch(text)), OTHER_CELL)
        rule = f"{cell!r} is not a number; {remedy}, or leave the column out by data.targets=[...]"
        raise ValueError(f"{where}, column {name}: {rule}")
    return value
