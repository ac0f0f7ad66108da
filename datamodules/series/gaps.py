"""Gaps of time series: missing rows and missing values, and what is done about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from datamodules.files.console import log
from datamodules.series.stamps import DAY
from datamodules.series.table import SHOWN, Table

Gaps = Literal["error", "split", "fill", "ignore"]
REMEDY = (
    "pass data.gaps=split to leave out windows with gaps, or data.gaps=fill to carry the last "
    "value on"
)
AS_STEPS = "data.gaps=ignore to take rows as steps, such as business days"
MOST_ADDED = 100  # rows for each row of the file
NIGHT = 4  # hours of a Sunday in which clocks change


def check_policy(gaps: str) -> None:
    """Refuse an unknown value of ``data.gaps``."""
    if gaps not in get_args(Gaps):
        raise ValueError(f"data.gaps must be one of {', '.join(get_args(Gaps))}; got {gaps!r}")


def close_gaps(table: Table, gaps: Gaps) -> tuple[Table, NDArray[np.bool_]]:
    """Return a table with evenly spaced rows, and for each row whether it is usable.

    Args:
        table: As read.
        gaps: "error" refuses gaps; "split" marks the missing rows, so that no window spans them;
            "fill" carries the last value before a gap on, which uses no later value; "ignore" takes
            rows as steps whatever their time stamps, as the benchmarks do.

    Raises:
        ValueError: Time stamps are unsorted or doubled, or there are gaps; the message names them.
    """
    check_policy(gaps)
    if gaps == "ignore":
        _refuse_missing(table)
        return table, np.ones(len(table), dtype=bool)
    _check_order(table)
    filled = _with_all_rows(table, gaps)
    missing = np.isnan(filled.values)
    if not missing.any():
        return filled, np.ones(len(filled), dtype=bool)
    if gaps == "error":
        _refuse_missing(filled)
    if gaps == "split":
        return filled, np.asarray(~missing.any(axis=1))
    return _carried_on(filled), np.ones(len(filled), dtype=bool)


def _check_order(table: Table) -> None:
    steps = np.diff(table.times)
    zero = np.zeros(1, dtype=steps.dtype)[0]
    doubled = np.flatnonzero(steps == zero)
    alike = np.median(np.unique(table.times, return_counts=True)[1])
    if alike > 1:
        raise ValueError(
            f"{table.source} has {alike:g} rows for most time stamps; write a column per series if "
            "several stand below each other, and date and time of day into one column"
        )
    if len(doubled):
        shown = ", ".join(table.row_name(int(row)) for row in doubled[:SHOWN])
        raise ValueError(
            f"{table.source} has {len(doubled)} duplicate time stamps ({shown}); keep one row "
            f"each{_clock_change(table, int(doubled[0]))}"
        )
    backwards = np.flatnonzero(steps < zero)
    if len(backwards):
        row = int(backwards[0])
        raise ValueError(
            f"{table.source} is not sorted by time: {table.row_name(row + 1)} follows "
            f"{table.row_name(row)}; sort its rows{_clock_change(table, row)}"
        )


def _with_all_rows(table: Table, gaps: Gaps) -> Table:
    """Return the table with a row for each step, NaN where the file lacks one."""
    if len(table) < 2:
        return table
    step, steps = table.stamps.step, np.diff(table.times)
    wide = np.flatnonzero(steps != step)
    if not len(wide):
        return table
    uneven = [int(row) for row in wide if steps[row] % step != steps[row] * 0]
    if uneven:
        row = uneven[0]
        raise ValueError(
            f"{table.source} has uneven time stamps: {table.row_name(row + 1)} follows "
            f"{table.row_name(row)}, which is no multiple of the usual step {step}; resample "
            "it, or pass data.gaps=ignore to take rows as steps"
        )
    shown = "; ".join(
        f"{int(steps[row] // step) - 1} after {table.row_name(int(row))}" for row in wide[:SHOWN]
    )
    count = int(sum(steps[row] // step - 1 for row in wide))
    found = f"{table.source} lacks {count} rows in {len(wide)} gaps ({shown})"
    if count > MOST_ADDED * len(table):
        raise ValueError(f"{found}; correct the time stamps there")
    if gaps == "error":
        change = _clock_change(table, int(wide[0]))
        raise ValueError(f"{found}; {REMEDY}, or {AS_STEPS}{change}")
    log(f"{found}; data.gaps={gaps}")
    places = ((table.times - table.times[0]) // step).astype(np.int64)
    times = table.times[0] + np.arange(places[-1] + 1) * step
    values = np.full((len(times), len(table.names)), np.nan)
    values[places] = table.values
    stamps = replace(table.stamps, weekdays=False)
    return Table(table.source, times, table.names, values, stamps)


def _clock_change(table: Table, row: int) -> str:
    """Return a hint if time jumps behind a row in a Sunday's night, and if not, nothing."""
    stamps = table.stamps
    if not stamps.form or stamps.rest is not None or stamps.step >= DAY:
        return ""
    day = table.times[row].astype("datetime64[D]")
    is_sunday = (day.astype(int) + 3) % 7 == 6
    if not is_sunday or table.times[row] - day >= np.timedelta64(NIGHT, "h"):
        return ""
    return "; clocks may have changed that night: write times in UTC, or with their offset"


def _refuse_missing(table: Table) -> None:
    missing = np.isnan(table.values)
    if missing.any():
        row, column = (int(one) for one in np.argwhere(missing)[0])
        raise ValueError(
            f"{table.source} has {int(missing.sum())} missing or infinite values, the first in "
            f"column {table.names[column]} at {table.row_name(row)}; {REMEDY}"
        )


def _carried_on(table: Table) -> Table:
    """Return the table with each missing value replaced by the one before it."""
    known = ~np.isnan(table.values)
    latest = np.maximum.accumulate(np.where(known, np.arange(len(table))[:, None], -1), axis=0)
    if (latest < 0).any():
        column = int(np.flatnonzero((latest < 0).any(axis=0))[0])
        raise ValueError(
            f"{table.source} begins without a value of {table.names[column]}, so data.gaps=fill "
            "has none to carry on; remove the first rows"
        )
    values = np.take_along_axis(table.values, latest, axis=0)
    return replace(table, values=values)
