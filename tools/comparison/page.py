"""Files of a comparison: report.html, table.md and table.tex."""

from __future__ import annotations

import base64
import contextlib
import io
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.figures import load_pyplot
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.schemas import read_rows
from tools.analyses.elements import Section, document, pairs, table, text
from tools.cli.printable import counted
from tools.cli.tables import escape_latex, format_cells, write
from tools.comparison.register import Registered
from tools.comparison.runner import Comparison
from tools.comparison.table import DAGGER, MISSING, Table

PACKAGES = ("torch", "timm", "lightning", "scipy", "numpy")
LEGEND_ROWS = 24
MARKS = {DAGGER: r"$^\dagger$", MISSING: r"$^\ddagger$"}


def write_files(comparison: Comparison, results: Table, registered: Registered) -> None:
    """Write report.html, table.md and table.tex into the folder of a comparison."""
    folder = comparison.folder
    with contextlib.redirect_stdout(io.StringIO()) as markdown:
        write(results.records, "markdown", results.columns)
        print(*(f"\n{line}  " for line in results.notes), sep="")
        print(f"\nplan {registered.hash}")
        print(*(f"\ndeviation: {line}  " for line in registered.deviations), sep="")
    write_whole(folder / "table.md", markdown.getvalue())
    write_whole(folder / "table.tex", latex(comparison, results, registered))
    write_whole(folder / "report.html", _page(comparison, results, registered))


def latex(comparison: Comparison, results: Table, registered: Registered) -> str:
    """Return a tabular with booktabs rules: the best of a column bold, the second underlined."""
    columns = results.columns
    rows = [format_cells(record, columns) for record in results.records]
    for place, key in enumerate(columns):
        if key in results.metrics:
            ranked = [  # without the controls
                None if record.get("role") else record[key] for record in results.records
            ]
            _emphasise(rows, place, ranked, comparison.plan.sign)
        else:
            for row in rows:
                row[place] = escape_latex(row[place])
                if row[place].startswith("["):  # a line break before it would take it
                    row[place] = f"{{{row[place]}}}"
    for row in rows:
        for mark, command in MARKS.items():
            row[0] = row[0].replace(mark, command)
    aligned = "".join("l" if key in ("mixer", "verdict", "beyond") else "r" for key in columns)
    heads = " & ".join(escape_latex(heading) for heading, _ in columns.values())
    lines = [
        f"% plan {registered.hash}", rf"\begin{{tabular}}{{{aligned}}}", r"\toprule",
        heads + r" \\", r"\midrule", *(" & ".join(row) + r" \\" for row in rows), r"\bottomrule",
        r"\end{tabular}", *(f"% {line}" for line in results.notes),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _emphasise(rows: list[list[str]], place: int, values: list[Any], sign: int) -> None:
    ranked = sorted({sign * value for value in values if value is not None}, reverse=True)
    for row, value in zip(rows, values, strict=True):
        if value is not None and sign * value == ranked[0]:
            row[place] = rf"\textbf{{{row[place]}}}"
        elif value is not None and len(ranked) > 1 and sign * value == ranked[1]:
            row[place] = rf"\underline{{{row[place]}}}"


def _page(comparison: Comparison, results: Table, registered: Registered) -> str:
    plan = comparison.plan
    baseline = plan.baseline
    facts = (
        f"{plan.task} · {counted(len(comparison.cells), 'cell')} · {plan.seeds} seeds · "
        f"baseline {baseline} · plan {registered.hash} of {registered.time}"
    )
    head = f'<h1>{text(plan.name)}</h1>\n<p class="facts">{text(facts)}</p>'
    notes = "".join(f"<p>{text(line)}</p>" for line in results.notes)
    changes = "".join(f"<li>{text(line)}</li>" for line in registered.deviations)
    runs = [
        run.model_dump(
            include={
                "stage",
                "mixer",
                "host",
                "data",
                "seed",
                "factor",
                "status",
                "value",
                "seconds",
                "folder",
                "reused",
                "reason",
            }
        )
        for run in comparison.journal
    ]
    run_columns = {key: (key, "{}") for key in (runs[0] if runs else {})}
    sections = [
        Section("table", "Table", table(results.records, results.columns, shows_all=True) + notes),
        Section("curves", "Curves", _curves(comparison), "mean of the seeds and their range"),
        Section("cells", "Cells", table(results.cells, results.cell_columns, shows_all=True)),
        Section("plan", "Plan", f"<pre>{text(registered.text)}</pre>",
                f"hash {registered.hash}, registered {registered.time}"),
        Section("deviations", "Deviations from the plan", f"<ul>{changes}</ul>" if changes else
                "<p>The runs follow the plan.</p>"),
        Section("runs", "Runs", table(runs, run_columns, shows_all=True)),
        Section("versions", "Versions", pairs(_versions())),
    ]  # fmt: skip
    return document(plan.name, head, sections)


def _versions() -> Mapping[str, str]:
    from tools.runs.source import read_source

    packages = {name: version(name) for name in PACKAGES}
    return {
        "commit": read_source().commit or "unknown",
        "python": platform.python_version(),
        **packages,
    }


def _curves(comparison: Comparison) -> str:
    """Return a plot per cell: the validation metric by step, with the range of the seeds."""
    plt = load_pyplot()
    key, parts = f"val/{comparison.plan.primary}", []
    for cell in comparison.cells:
        columns = -(-len(comparison.mixers) // LEGEND_ROWS)
        figure, axis = plt.subplots(figsize=(6 + 1.4 * columns, 4), layout="constrained")
        styles = plt.cycler(marker=[".", "x"]) * plt.cycler(linestyle=["-", "--", ":", "-."])
        axis.set_prop_cycle(styles * plt.cycler(color=plt.get_cmap("tab10").colors))
        for entry in comparison.mixers:
            lines = [
                line
                for run in comparison.journal.finished()
                if (run.mixer, run.cell) == (entry.label, cell.key)
                and (line := _line(Path(run.folder), key))
            ]
            steps = sorted(set.intersection(*(set(line) for line in lines))) if lines else []
            if steps:
                values = np.array([[line[step] for step in steps] for line in lines])
                (curve,) = axis.plot(steps, values.mean(0), label=entry.label)
                axis.fill_between(
                    steps, values.min(0), values.max(0), alpha=0.2, color=curve.get_color()
                )
        axis.set(title=f"{cell.host} on {cell.data}", xlabel="step", ylabel=key)
        if axis.lines:
            figure.legend(loc="outside right upper", fontsize=7, ncols=columns)
            content = io.BytesIO()
            figure.savefig(content, dpi=90, format="png")
            data = base64.b64encode(content.getvalue()).decode()
            name = text(f"{cell.host} on {cell.data}")
            parts.append(f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>')
        plt.close(figure)
    return f'<div class="figures">{"".join(parts)}</div>' if parts else "<p>None were measured.</p>"


def _line(folder: Path, key: str) -> dict[int, float]:
    try:
        rows = read_rows(folder / "metrics.csv")
    except DamagedFile:
        return {}
    return {row["step"]: row[key] for row in rows if key in row}
