"""Print records as a table, Markdown, LaTeX, JSON or CSV."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tools.cli.printable import printable

Record = dict[str, Any]
Columns = Mapping[str, tuple[str, str]]  # key -> heading and format of the values
FORMATS = ("table", "json", "csv")
TEXT_FORMATS = ("markdown", "latex")  # for tables inside a document
# Columns aligned to the left.
LEFT_ALIGNED = {
    "backbone", "model", "mixer", "verdict", "note", "step", "head", "data", "settings", "paper",
    "experiment", "class", "beyond", "role",
}  # fmt: skip
FOLDED = ("backbone", "model", "mixer", "experiment", "head", "reported_metric")


def write(records: Sequence[Record], form: str, columns: Columns) -> None:
    """Print records in a format; tables show only the keys in ``columns``."""
    if form == "json":
        print(json.dumps([_round_values(record) for record in records], indent=2))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(records[0]), lineterminator="\n")
        writer.writeheader()
        for record in map(_round_values, records):
            writer.writerow(
                {k: printable(v) if isinstance(v, str) else v for k, v in record.items()}
            )
    else:
        heads = {key: columns[key] for key in records[0] if key in columns}
        terminal = _write_rich if sys.stdout.isatty() else _write_plain
        {"markdown": _write_markdown, "latex": _write_latex}.get(form, terminal)(records, heads)


def _write_markdown(records: Sequence[Record], columns: Columns) -> None:
    rules = [":---" if key in LEFT_ALIGNED else "---:" for key in columns]
    headings = [heading for heading, _ in columns.values()]
    for row in (headings, rules, *(format_cells(record, columns) for record in records)):
        print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")


def _write_latex(records: Sequence[Record], columns: Columns) -> None:
    """Print a LaTeX tabular with booktabs rules."""
    headings = [heading for heading, _ in columns.values()]
    rows = [headings, *(format_cells(record, columns) for record in records)]
    aligned = "".join("l" if key in LEFT_ALIGNED else "r" for key in columns)
    lines = [" & ".join(map(escape_latex, row)) + r" \\" for row in rows]
    print(rf"\begin{{tabular}}{{{aligned}}}", r"\toprule", lines[0], r"\midrule", sep="\n")
    print(*lines[1:], r"\bottomrule", r"\end{tabular}", sep="\n")


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    text = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", r"\textbackslash "))
    return (
        text.replace("~", r"\textasciitilde ")
        .replace("^", r"\textasciicircum ")
        .replace("±", r"$\pm$")
    )


def _write_plain(records: Sequence[Record], columns: Columns) -> None:
    """Print aligned columns, for programs."""
    headings = [heading for heading, _ in columns.values()]
    cells = [headings, *(format_cells(record, columns) for record in records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        parts = [
            cell.ljust(width) if key in LEFT_ALIGNED else cell.rjust(width)
            for key, cell, width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _write_rich(records: Sequence[Record], columns: Columns) -> None:
    """Print a table that fits the terminal; notes are numbered and printed below it."""
    from rich.console import Console
    from rich.table import Table

    notes = list(dict.fromkeys(record["note"] for record in records if record.get("note")))
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold underline")
    for key, (heading, _) in columns.items():
        # On a narrow terminal names are folded; figures are never folded.
        justify: Literal["left", "right"] = "left" if key in LEFT_ALIGNED else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=key not in FOLDED)
    for record in records:
        number = {"note": str(notes.index(record["note"]) + 1)} if record.get("note") else {}
        table.add_row(*format_cells(record | number, columns))
    console = Console(highlight=False)
    console.print(table)
    for index, note in enumerate(notes, start=1):
        console.print(printable(f"{index}  {note}"), markup=False)


def format_cells(record: Record, columns: Columns) -> list[str]:
    """Return the texts of a row."""
    values = [(record[key], form) for key, (_, form) in columns.items()]
    texts = ["-" if value is None else form.format(value) for value, form in values]
    return [printable(text) for text in texts]


def _round_values(record: Record) -> Record:
    """Round floats to 9 digits, which removes binary noise and keeps G to the single operation."""
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in record.items()}
