"""Pages of published rows, and README's table of papers.

usage: python docs/_ext/paper_pages.py     rewrite the table in README.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accuracies
import paper_counts
from markup import prose, table

from backbones.registry import look_up
from tools.papers.published import Row, list_papers

README = Path(__file__).resolve().parents[2] / "README.md"
MARKS = ("<!-- papers: python docs/_ext/paper_pages.py -->", "<!-- end of papers -->")
INTRODUCTION = """# Published rows

Every row of these papers that reports a metric is an experiment of `tools/run.py`.
[The papers' rows](../../howto/paper_rows.md) shows how rows run with other data or lengths, and
[Fidelity](../../explanation/fidelity.md) how counts are judged.

"""
PAGE = """# {name}: published rows

{title}.

`python tools/run.py experiment=<name>` trains a row, and
`python tools/complexity.py paper={name}` prints this table with the changes relative to the plain
host. Counts are exact at the row's image size.

"""
CONTENTS = """
```{toctree}
:maxdepth: 1

%s
```
"""


def pages() -> dict[str, str]:
    """Return the pages."""
    names = list_papers()
    found = {f"published/{name}": _page(name) for name in names}
    index = INTRODUCTION + papers_table(full=True) + "\n" + CONTENTS % "\n".join(names)
    return {"papers_table": papers_table(full=True), "published/index": index, **found}


def _page(paper: str) -> str:
    text = PAGE.format(name=paper, title=paper_counts.title(paper))
    rows = [
        [_experiment(row), row.table, paper_counts.verdict(row), *_figures(row)]
        for row in paper_counts.rows(paper)
    ]
    head = [
        "experiment",
        "table",
        "counts",
        "reports",
        "paper M, G",
        "our parameters",
        "our MACs G",
    ]
    notes = [
        f"* `{row}` (Table {row.table}): {prose(row.note)}"
        for row in paper_counts.rows(paper)
        if row.note
    ]
    open_settings = [
        f"* `{row.name}`: {prose(row.train.cannot_run)}."
        for row in paper_counts.rows(paper)
        if row.train.cannot_run
    ]
    parts = [text + table(head, rows), _mixers(paper)]
    if open_settings:
        parts.append("## Rows that need a setting from you\n\n" + "\n".join(open_settings))
    if notes:
        parts.append("## Notes\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _mixers(paper: str) -> str:
    """Name the mixers of the rows, with links to their pages."""
    networks = {look_up(row.backbone)[1] for row in paper_counts.rows(paper)}
    named = {
        dict(row.options.get("token_mixer") or {}).get("name") for row in paper_counts.rows(paper)
    }
    links = [f"[{name}](../mixers/{name}.md)" for name in sorted((networks | named) - {None})]
    if not links:
        return "The rows are those of hosts with their own mixers."
    return f"The page of each mixer states what the paper leaves open: {', '.join(links)}."


def _experiment(row: Row) -> str:
    return f"`{row.name}`" if row.name else f"{row} (counts only)"


def _figures(row: Row) -> list[str]:
    reported = [str(row.reported[key]) for key in ("params", "flops") if key in row.reported]
    metrics = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items())
    macs = "" if row.macs is None else f"{row.macs:.4f}"
    return [metrics, ", ".join(reported), f"{row.params:,}", macs]


def rows_table(rows: Sequence[Row]) -> str:
    """Return a table of rows of several papers; empty without rows."""
    lines = []
    for row in rows:
        metrics = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items())
        cited = f"[{row.paper}](../published/{row.paper}.md), Table {row.table}"
        lines.append([cited, f"`{row.name or row}`", metrics, paper_counts.verdict(row)])
    return table(["paper", "experiment", "reports", "counts"], lines) if lines else ""


def papers_table(*, full: bool = False) -> str:
    """Return the table of papers: rows that run, what was verified, what is missing.

    Args:
        full: With authors and titles, for a page without a limit of width.
    """
    rows = []
    for paper in list_papers():
        all_rows = paper_counts.rows(paper)
        named = [row for row in all_rows if row.name]
        needing = sum(bool(row.train.cannot_run) for row in named)
        verdicts = [found for row in all_rows if (found := paper_counts.verdict(row))]
        agreeing = sum(found == "agrees" for found in verdicts)
        unknown = sum(found.startswith("DIFFERS") for found in verdicts)
        known = len(verdicts) - agreeing - unknown
        gaps = ["accuracy"]
        gaps += [f"cause of {unknown} counts"] if unknown else []
        gaps += [f"a setting of {needing} rows"] if needing else []
        title = paper_counts.title(paper)
        venue = title.rpartition('"')[2]
        cited = f"`{paper}`: {title}" if full else f"`{paper}`{venue}"
        running, agree = f"{len(named) - needing} of {len(named)}", f"{agreeing} of {len(verdicts)}"
        judged = accuracies.paper_verdicts(all_rows)
        reproduced = f"{sum(judged)} of {len(judged)}" if judged else "none measured"
        rows.append([cited, running, agree, known, reproduced, ", ".join(gaps)])
    head = ["paper", "rows that run", "counts that agree", "differ for a known cause"]
    return table([*head, "accuracies reproduced", "missing"], rows)


def write_readme() -> None:
    """Put the current table between README's marks."""
    start, end = (re.escape(mark) for mark in MARKS)
    text = README.read_text(encoding="utf-8")
    new = f"{MARKS[0]}\n{papers_table()}\n{MARKS[1]}"
    README.write_text(re.sub(f"{start}.*?{end}", lambda _: new, text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    write_readme()
