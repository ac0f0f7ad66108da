"""Writes what an analysis found: pictures as PNG and SVG, numbers as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

from tools.analysing import Findings

DPI = 130


def write_findings(name: str, findings: Findings, folder: Path) -> list[Path]:
    """Write the files of an analysis into a folder, which is made; those of before are replaced.

    Returns:
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if findings.rows:
        path = folder / f"{name}.csv"
        keys = list(dict.fromkeys(key for row in findings.rows for key in row))
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.DictWriter(file, keys, lineterminator="\n")
            writer.writeheader()
            writer.writerows(findings.rows)
        written.append(path)
    for title, figure in findings.figures.items():
        for ending in ("png", "svg"):
            path = folder / f"{title}.{ending}"
            metadata = {"Date": None} if ending == "svg" else None
            figure.savefig(path, dpi=DPI, metadata=metadata)
            written.append(path)
        _close(figure)
    for title, text in findings.files.items():
        (folder / title).write_text(text, encoding="utf-8")
        written.append(folder / title)
    return written


def _close(figure: object) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)  # type: ignore[arg-type]
