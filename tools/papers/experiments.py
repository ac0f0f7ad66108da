"""Rows of the papers by the names that ``experiment=`` takes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping

from tools.papers.published import Row, list_papers, load_rows

# Metrics that describe a row; the first that the row has is used.
HEADLINES = {
    "top1": "% top-1",
    "top1_finetune": "% top-1",
    "top1_linear_probe": "% top-1",
    "ap": "box AP",
    "miou": "mIoU",
    "psnr_set5": "dB on Set5",
    "mse": "MSE",
}


@functools.cache
def experiments() -> Mapping[str, Row]:
    """Return all rows that report a metric, by name; rows of one table are neighbours.

    Raises:
        ValueError: Two rows of a paper share a name; one of them needs a ``variant``.
    """
    rows_by_name: dict[str, Row] = {}
    for paper in list_papers():
        for row in sorted(load_rows(paper), key=lambda row: row.table):
            if not row.name:
                continue
            if row.name in rows_by_name:
                raise ValueError(f"two rows of {paper} are named {row.name}; give one a variant")
            rows_by_name[row.name] = row
    return rows_by_name


def find_experiment(name: str) -> Row:
    """Return the row with a name.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest.
    """
    rows = experiments()
    if name in rows:
        return rows[name]
    longer = [row_name for row_name in rows if _is_abbreviation(name, row_name)]
    near = sorted(longer, key=len)[:3] or difflib.get_close_matches(name, rows, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"unknown experiment {name!r}; {hint}names are <paper>_t<table>_<backbone>, and "
        "python tools/run.py --help experiment lists all"
    )


def _is_abbreviation(text: str, name: str) -> bool:
    """Return True if ``text`` is ``name`` without some of its words, such as the table."""
    words = iter(name.split("_"))
    return all(word in words for word in text.split("_"))


def describe(row: Row) -> str:
    """Return the reported metric of a row, such as ``74.6 % top-1``."""
    metric = next((name for name in HEADLINES if name in row.metrics), next(iter(row.metrics)))
    return f"{row.metrics[metric]} {HEADLINES.get(metric, metric)}"
