"""Gaps of time series: missing rows and missing values, and what is done about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from datamodules.files.console import log
from datamodules.files.values import refuse
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
    rows_per_stamp = np.median(np.unique(table.times, return_counts=True)[1])
    backwards = np.flatnonzero(steps < zero)
    places_shown = ", ".join(table.row_name(int(row)) for row in doubled[:SHOWN])
    after = [int(rows[0]) for rows in (doubled, backwards) if len(rows)]
    hint = _clock_change(table, after[0]) if after else ""
    row = int(backwards[0]) if len(backwards) else 0
    faults = {
        f"has {rows_per_stamp:g} rows for most time stamps; write a column per series if several "
        "stand below each other, and date and time of day into one column": rows_per_stamp > 1,
        f"has {len(doubled)} duplicate time stamps ({places_shown}); keep one row each{hint}": (
            len(doubled) > 0
        ),
        f"is not sorted by time: {table.row_name(row + 1)} follows {table.row_name(row)}; sort its "
        f"rows{hint}": len(backwards) > 0,
    }
    if after:
        refuse(table.source, faults)


def _with_all_rows(table: Table, gaps: Gaps) -> Table:
    """Return the table with a row for each step, NaN where the file lacks one."""
    if len(table) < 2:
        return table
    step, steps = table.stamps.step, np.diff(table.times)
    gap_rows = np.flatnonzero(steps != step)
    if not len(gap_rows):
        return table
    uneven = [int(row) for row in gap_rows if steps[row] % step != steps[row] * 0]
    if uneven:
        row = uneven[0]
        rule = (
            f"has uneven time stamps: {table.row_name(row + 1)} follows {table.row_name(row)}, "
            f"which is no multiple of the usual step {step}; resample it, or pass data.gaps=ignore "
            "to take rows as steps"
        )
        raise ValueError(f"{table.source} {rule}")
    places_shown = "; ".join(
        f"{int(steps[row] // step) - 1} after {table.row_name(int(row))}"
        for row in gap_rows[:SHOWN]
    )
    count = int(sum(steps[row] // step - 1 for row in gap_rows))
    finding = f"{table.source} lacks {count} rows in {len(gap_rows)} gaps ({places_shown})"
    change = _clock_change(table, int(gap_rows[0]))
    faults = {
        "are too many; correct the time stamps there": count > MOST_ADDED * len(table),
        f"that are refused; {REMEDY}, or {AS_STEPS}{change}": gaps == "error",
    }
    refuse(finding, faults)
    log(f"{finding}; data.gaps={gaps}")
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
        row, column = (int(place) for place in np.argwhere(missing)[0])
        rule = (
            f"has {int(missing.sum())} missing or infinite values, the first in column "
            f"{table.names[column]} at {table.row_name(row)}; {REMEDY}"
        )
        raise ValueError(f"{table.source} {rule}")


def _carried_on(table: Table) -> Table:
    """Return the table with each missing value replaced by the one before it."""
    is_value = ~np.isnan(table.values)
    latest = np.maximum.accumulate(np.where(is_value, np.arange(len(table))[:, None], -1), axis=0)
    rule = "begins without values, so data.gaps=fill has none to carry on; remove the first rows of"
    columns = [table.names[column] for column in np.flatnonzero((latest < 0).any(axis=0))]
    refuse(table.source, {rule: columns})
    values = np.take_along_axis(table.values, latest, axis=0)
    return replace(table, values=values)
