"""Print run folders as tables and plot them: for results.py, and after a sweep."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.engine.run_folder.atomic_writes import write_whole
from tools.cli.printable import printable
from tools.cli.tables import Columns, Record, write
from tools.comparing.evaluations import format_evaluation, group_by_evaluation
from tools.comparing.run_records import RunRecord, read_run
from tools.comparing.table import (
    Row,
    chosen_metrics,
    make_rows,
    record,
    refuse_unknown,
    refuse_unknown_metrics,
    setting,
)
from tools.comparing.terms import describe_terms

# Options; results.py documents them.
DEFAULTS = {"by": "", "metric": "", "free": "", "format": "table", "plot": "", "out": ""}
COSTS = ("", "params", "macs", "latency")  # of ``plot``; other values are settings
STATES = {
    "failed": "failed",
    "unfinished": "not finished",
    "unreadable": "cannot be used",
    "evaluation": "an evaluation",
}


@dataclass(frozen=True)
class Table:
    """Rows of one evaluation.

    Attributes:
        rows: The rows.
        metrics: The shown metrics.
        records: The rows as records for output.
        columns: Columns of the text table.
        heading: Difference of this evaluation from those of other tables.
        footer: Lines on differences between the rows besides their mixers.
    """

    rows: Sequence[Row]
    metrics: Sequence[str]
    records: list[Record]
    columns: Columns
    heading: str
    footer: Sequence[str]

    @property
    def task(self) -> str:
        """Return the task of all rows."""
        return self.rows[0].first.task


def show(folders: Sequence[Path], options: dict[str, str]) -> None:
    """Print the tables of run folders, draw their plots, and list the runs that are left out.

    Raises:
        ValueError: No run is finished, an option is unknown to all runs, or a file of a run would
            be replaced.
        OSError: The file cannot be written.
    """
    out = Path(options["out"])
    if any(folder.resolve() in out.resolve().parents for folder in folders):
        raise ValueError(f"out={out} lies in one of the run folders; name a file beside them")
    runs = [read_run(folder) for folder in folders]
    finished = [run for run in runs if run.status == "finished"]
    _name_others(runs)
    if not finished:
        raise ValueError(f"none of {len(runs)} runs is a finished training run")
    notes: list[str] = []
    free_keys = options["free"].split(",") if options["free"] else []
    axis = "" if options["plot"] in COSTS else options["plot"]
    tables: list[Table] = []
    refuse_unknown_metrics(finished, options["metric"])
    for task in sorted({run.task for run in finished}):
        task_runs = [run for run in finished if run.task == task]
        by = options["by"].split(",") if options["by"] else _usual_labels(task_runs)
        by += [axis] if axis and axis not in by else []
        refuse_unknown(task_runs, [*by, *free_keys, *([axis] if axis else [])])
        groups = [
            (evaluation, make_rows(runs, by, free_keys, notes))
            for evaluation, runs in group_by_evaluation(task_runs, free_keys)
        ]
        metrics = chosen_metrics([row for _, rows in groups for row in rows], task,
                                 options["metric"])  # fmt: skip
        for evaluation, rows in groups:
            footer = describe_terms(rows, axis)
            heading = format_evaluation(evaluation)
            tables.append(_table(rows, by, metrics, heading, footer))
    if options["plot"]:
        _plots(tables, options, notes)
    elif options["out"]:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            _print(tables, options["format"])
        write_whole(Path(options["out"]), text.getvalue())
    if options["plot"] or not options["out"]:
        _print(tables, options["format"])
    for note in dict.fromkeys(notes):
        tell(note)


def _usual_labels(runs: Sequence[RunRecord]) -> list[str]:
    heads = {setting(run, "head")[1] for run in runs}
    return ["backbone", "head"] if len(heads) > 1 else ["backbone"]


def _table(
    rows: Sequence[Row],
    by: Sequence[str],
    metrics: Sequence[str],
    heading: str,
    footer: Sequence[str],
) -> Table:
    """Make the records of one evaluation, and drop empty columns."""
    records = [{**record(row, by, metrics), "evaluation": heading} for row in rows]
    columns: dict[str, tuple[str, str]] = {key: (key, "{}") for key in (*by, "settings")}
    columns["runs"] = ("runs", "{}")
    for name in metrics:
        figures = "{:.2f}" if max(row.mean.get(name, 0) for row in rows) > 1 else "{:.4f}"
        signed = figures.replace(":", ":+")
        columns |= {
            name: (name, figures),
            f"{name}_std": ("+-", figures),
            f"{name}_paper": (f"paper {name}", figures),
            f"{name}_difference": ("diff", signed),
        }
    columns |= {
        "paper": ("paper", "{}"),
        "parameters_m": ("params M", "{:.2f}"),
        "backbone_macs_g": ("MACs G", "{:.3f}"),
        "image_size": ("at", "{}"),
        "seconds": ("time s", "{:.0f}"),
        "terms": ("terms", "{}"),
        "model": ("model", "{}"),
        "folder": ("folder", "{}"),
    }
    always = {*by, *metrics, *(f"{name}_std" for name in metrics), "runs"}
    for key in [key for key in columns if key not in always]:
        if not any(record[key] for record in records):
            del columns[key]
    return Table(rows, metrics, records, columns, heading, footer)


def _print(tables: Sequence[Table], form: str) -> None:
    if form in (
        "json",
        "csv",
    ):  # one document; missing figures become empty fields
        records = [record for table in tables for record in table.records]
        keys = dict.fromkeys(key for record in records for key in record)
        write([{key: record.get(key) for key in keys} for record in records], form, {})
        return
    for number, table in enumerate(tables):
        if len(tables) > 1:
            title = printable(", ".join(filter(None, [f"task={table.task}", table.heading])))
            marks = {"markdown": f"**{title}**\n", "latex": f"% {title}"}
            print(f"{chr(10) * bool(number)}{marks.get(form, title)}")
        write(table.records, form, table.columns)
        for place, line in enumerate(map(printable, table.footer)):
            marks = {"markdown": f"{chr(10) * (not place)}{line}  ", "latex": f"% {line}"}
            print(marks.get(form, line))


def _plots(tables: Sequence[Table], options: dict[str, str], notes: list[str]) -> None:
    """Draw a plot per table, since different evaluations are not comparable."""
    from tools.comparing.plot import plot

    cost = options["plot"]
    for task in dict.fromkeys(table.task for table in tables):
        task_tables = [table for table in tables if table.task == task]
        for number, table in enumerate(task_tables, start=1):
            runs = [run for sibling in task_tables for row in sibling.rows for run in row.runs]
            if not any(table.metrics[0] in row.mean for row in table.rows):
                notes.append(f"task={task} lacks {table.metrics[0]}, so that its plot is left out")
                continue
            parent = os.path.commonpath([run.folder.parent for run in runs])
            path = Path(options["out"] or f"{parent}/results_{task}_{cost}.png")
            words = [task] if options["out"] and len(task_tables) < len(tables) else []
            words += [str(number)] if len(task_tables) > 1 else []
            path = path.with_name("_".join([path.stem, *words]) + path.suffix)
            notes += plot(
                table.rows, table.metrics[0], cost, path, heading=table.heading,
                footer=table.footer,
            )  # fmt: skip
            notes.append(f"plot: {path}")


def _name_others(runs: Sequence[RunRecord]) -> None:
    for run in runs:
        if run.status in ("failed", "unfinished", "unreadable"):
            tell(f"{run.folder} {STATES[run.status]}: {run.reason}")
    evaluations = sum(run.status == "evaluation" for run in runs)
    if evaluations:
        tell(f"{evaluations} evaluations (mode=validate, test or predict) are left out")


def tell(text: str) -> None:
    """Print a note to standard error; the table goes to standard output."""
    print(f"results.py: {printable(text)}", file=sys.stderr)
