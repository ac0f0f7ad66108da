"""Time stamps of a table: reading, months as steps, and writing in the form of the file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.files.console import log
from datamodules.files.values import refuse

Times = NDArray[np.generic]
DAY = np.timedelta64(1, "D")
MONTHS = np.dtype("datetime64[M]")
DAY_FIRST, MONTH_FIRST = "%d/%m/%Y", "%m/%d/%Y"
CLOCKS = (" %H:%M:%S", " %H:%M", "")
ISO = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m")
FORMATS = (
    *(f"%Y-%m-%d{clock}" for clock in CLOCKS), *ISO,
    *(f"%Y/%m/%d{clock}" for clock in CLOCKS), *(f"%d.%m.%Y{clock}" for clock in CLOCKS),
    *(f"{day}{clock}" for day in (MONTH_FIRST, DAY_FIRST) for clock in CLOCKS),
)  # fmt: skip
COMPACT = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}  # by the number of digits
CENTURIES = ("19", "20")
WHOLE = re.compile(r"(-?[0-9]{1,18})(\.0+)?")
UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


@dataclass(frozen=True)
class Stamps:
    """Format of a file's times, and their next steps.

    Attributes:
        column: Name of the column.
        form: ``strftime`` format; empty for whole numbers.
        step: Usual distance of two rows; None for fewer than two.
        rest: If steps are months, the time from a month's first moment to its stamp.
        weekdays: True if rows are the days from Monday to Friday.
    """

    column: str
    form: str = ""
    step: Any = None
    rest: Any = None
    weekdays: bool = False

    def plain(self, times: Times) -> Times:
        """Return times as dates or numbers, where steps may be months."""
        return times if self.rest is None else times.astype("datetime64[s]") + self.rest

    def after(self, last: Any, count: int) -> Times:
        """Return the next stamps behind one of a table, as dates or numbers."""
        if self.weekdays:
            day = last.astype("datetime64[D]")
            clock = last - day.astype(last.dtype)
            days: Any = np.busday_offset(day, np.arange(1, count + 1), roll="backward")
            return np.asarray(days.astype(last.dtype) + clock)
        return self.plain(np.asarray(last + np.arange(1, count + 1) * self.step))

    def texts(self, times: Times) -> list[str]:
        """Return dates or numbers as the file writes them."""
        if not self.form:
            return [str(time) for time in times]
        dates = times.astype("datetime64[us]").tolist()
        return [date.strftime(self.form) for date in dates]

    @property
    def step_name(self) -> str:
        """The step in its largest unit, such as "1 hour"; empty if unknown."""
        if self.step is None or not self.form:
            return "" if self.step is None else str(self.step)
        if self.rest is not None:
            unit, count = "month", self.step.astype(int)
        else:
            seconds = self.step / np.timedelta64(1, "s")
            unit, length = next((choice for choice in UNITS if seconds % choice[1] == 0), UNITS[-1])
            count = seconds / length
        return f"{count:g} {unit}{'' if count == 1 else 's'}"


def read_stamps(
    source: str, cells: Sequence[tuple[int, str]], column: str, form: str | None, usual: str = ""
) -> tuple[Times, Stamps]:
    """Return time stamps, of which months are datetime64[M], and how they are written.

    Args:
        source: Name of the file in messages.
        cells: Number of its row and text of each stamp.
        column: Name of their column.
        form: Their format; None recognises it.
        usual: Format that is preferred where several fit.

    Raises:
        ValueError: A cell is not a time stamp, or day and month could be exchanged.
    """
    times, form = _read(source, cells, form, usual)
    if len(times) < 2:
        return times, Stamps(column, form)
    rest, weekdays = None, False
    if form:
        times, rest = _as_months(times)
    steps: Any = np.diff(times)
    step = np.sort(steps)[len(steps) // 2]
    if form and rest is None and step == DAY:
        weekdays = bool(np.is_busday(times.astype("datetime64[D]")).all() and (steps > step).any())
    return times, Stamps(column, form, step, rest, weekdays)


def _as_months(times: Any) -> tuple[Times, Any]:
    """Return months, and what each adds to its first moment, if all add the same.

    The last day of a month is a day before the next month.
    """
    for begins in (times.astype(MONTHS), times.astype(MONTHS) + 1):
        rest = times - begins.astype(times.dtype)
        if (rest == rest[0]).all() and (np.diff(begins).astype(int) != 0).any():
            return begins, rest[0]
    return times, None


def _read(
    source: str, cells: Sequence[tuple[int, str]], form: str | None, usual: str
) -> tuple[Times, str]:
    texts = [text for _, text in cells]
    if form is None:
        matches = [WHOLE.fullmatch(text) for text in texts]
        if all(matches):
            digits = [match[1] for match in matches if match]
            compact = COMPACT.get(len(texts[0]), "")
            if compact and all(text.startswith(CENTURIES) for text in texts):
                times = _parsed(texts, compact)
                if times is not None:
                    return times, compact
            return np.array(digits, dtype=np.int64), ""
        try:
            return _read_iso(source, texts)
        except ValueError:
            pass
    forms = FORMATS if form is None else (form,)
    fits = {kind: times for kind in forms if (times := _parsed(texts, kind)) is not None}
    either = len(fits) > 1 and usual not in fits
    remedy = (
        f"pass data.time_format='{DAY_FIRST}' or '{MONTH_FIRST}', with the time if there is one"
    )
    rule = f"{texts[0]!r} may begin with the day or the month; {remedy}"
    refuse(f"{source}:", {rule: either})
    if fits:
        form = usual if usual in fits else next(iter(fits))
        return fits[form], form
    best = max(forms, key=lambda kind: sum(_fits(text, kind) for text in texts[:100]))
    number, text = next(cell for cell in cells if not _fits(cell[1], best))
    raise ValueError(
        f"{source}, row {number}: {text!r} is not a time stamp; write 2024-01-31 13:00:00, "
        "or pass data.time_format, such as '%d.%m.%Y %H:%M'"
    )


def _fits(text: str, form: str) -> bool:
    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def _parsed(texts: Sequence[str], form: str) -> Times | None:
    """Return the dates of texts of one format; None if one has another."""
    try:
        dates = [datetime.strptime(text, form) for text in texts]
    except ValueError:
        return None
    return np.array(dates, dtype="datetime64[s]")


def _read_iso(source: str, texts: Sequence[str]) -> tuple[Times, str]:
    with warnings.catch_warnings(record=True) as offsets:
        warnings.simplefilter("always")
        exact = np.array([text.removesuffix("Z") for text in texts], dtype="datetime64[us]")
    if np.isnat(exact).any():  # an empty cell
        raise ValueError(f"{source} has rows without a time stamp")
    longest = max(texts, key=len)
    form = next(
        (choice for choice in FORMATS if _fits(longest.removesuffix("Z"), choice)), FORMATS[0]
    )
    zone = "Z" if longest.endswith("Z") else ""
    if offsets:  # numpy converts them
        log(f"{source}: time stamps with an offset are converted to UTC")
        form, zone = FORMATS[0], "+00:00"
    times = exact.astype("datetime64[s]")
    if (times == exact).all():
        return times, form + zone
    return exact, f"{form}.%f{zone}"
