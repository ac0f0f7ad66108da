"""Prints run folders side by side and draws their plot: results.py, and the end of a sweep."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.command_line.tables import Columns, Record, write
from tools.comparing.records import RunRecord, read_run
from tools.comparing.table import Row, chosen_metrics, make_rows, record, setting

# What may be asked for; results.py says what each is.
DEFAULTS = {"by": "", "metric": "", "free": "", "format": "table", "plot": "", "out": ""}
STATES = {
    "failed": "failed",
    "unfinished": "not finished",
    "unreadable": "cannot be used",
    "evaluation": "an evaluation",
}


def show(folders: Sequence[Path], options: dict[str, str]) -> None:
    """Print the table of some run folders, draw the plot, and name what is in neither.

    Raises:
        ValueError: No run is finished, or an option names what no run has.
    """
    runs = [read_run(folder) for folder in folders]
    finished = [run for run in runs if run.status == "finished"]
    _name_others(runs)
    if not finished:
        raise ValueError(f"none of {len(runs)} runs is a finished training run")
    notes: list[str] = []
    free = options["free"].split(",") if options["free"] else []
    tables: list[tuple[list[Record], Columns]] = []
    for task in sorted({run.task for run in finished}):
        own = [run for run in finished if run.task == task]
        by = options["by"].split(",") if options["by"] else _usual_labels(own)
        rows = make_rows(own, by, free, notes)
        metrics = chosen_metrics(rows, task, options["metric"])
        tables.append(_table(rows, by, metrics))
        if options["plot"]:
            _plot(rows, metrics[0], options, notes, several=len({r.task for r in finished}) > 1)
    if options["out"] and not options["plot"]:
        try:
            with Path(options["out"]).open("w") as file, contextlib.redirect_stdout(file):
                _print(tables, options["format"])
        except OSError as error:
            raise ValueError(f"out={options['out']} cannot be written ({error})") from error
    else:
        _print(tables, options["format"])
    for note in dict.fromkeys(notes):
        tell(note)


def _usual_labels(runs: Sequence[RunRecord]) -> list[str]:
    heads = {setting(run, "head")[1] for run in runs}
    return ["backbone", "head"] if len(heads) > 1 else ["backbone"]


def _table(
    rows: Sequence[Row], by: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Record], Columns]:
    """The records of a task and the columns that have something in them."""
    records = [dict(record(row, by, metrics)) for row in rows]
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
    }
    always = {*by, *metrics, *(f"{name}_std" for name in metrics), "runs"}
    for key in [key for key in columns if key not in always]:
        if not any(record[key] for record in records):
            del columns[key]
    return records, columns


def _print(tables: Sequence[tuple[list[Record], Columns]], form: str) -> None:
    if form in ("json", "csv"):  # one document, with an empty field where a task has no such figure
        keys = dict.fromkeys(key for records, _ in tables for one in records for key in one)
        write([{key: one.get(key) for key in keys} for records, _ in tables for one in records],
              form, {})  # fmt: skip
        return
    for number, (records, columns) in enumerate(tables):
        if len(tables) > 1:
            title = f"task={records[0]['task']}"
            marks = {"markdown": f"**{title}**\n", "latex": f"% {title}"}
            print(f"{chr(10) * bool(number)}{marks.get(form, title)}")
        write(records, form, columns)


def _plot(
    rows: Sequence[Row],
    metric: str,
    options: dict[str, str],
    notes: list[str],
    *,
    several: bool,
) -> None:
    from tools.comparing.plot import plot

    task, cost = rows[0].first.task, options["plot"]
    beside = os.path.commonpath([run.folder.parent for row in rows for run in row.runs])
    path = Path(options["out"] or f"{beside}/results_{task}_{cost}.png")
    if options["out"] and several:  # a picture for each task
        path = path.with_name(f"{path.stem}_{task}{path.suffix}")
    notes += plot(rows, metric, cost, path)
    notes.append(f"plot: {path}")


def _name_others(runs: Sequence[RunRecord]) -> None:
    for run in runs:
        if run.status in ("failed", "unfinished", "unreadable"):
            tell(f"{run.folder} {STATES[run.status]}: {run.reason}")
    evaluations = sum(run.status == "evaluation" for run in runs)
    if evaluations:
        tell(f"{evaluations} evaluations (mode=validate, test or predict) are left out")


def tell(text: str) -> None:
    """A line beside the table, which goes to standard output."""
    print(f"results.py: {text}", file=sys.stderr)
