"""Write the results of an analysis: figures as PNG and SVG, numbers as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tasks.engine.run_folder.atomic_writes import whole_file, write_whole
from tools.analyses import Findings

DPI = 130


def write_findings(name: str, findings: Findings, folder: Path) -> list[Path]:
    """Write the files of an analysis into a folder, replacing earlier ones.

    Returns:
        The written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    if findings.rows:
        path = folder / f"{name}.csv"
        keys = list(dict.fromkeys(key for row in findings.rows for key in row))
        content = io.StringIO()
        writer = csv.DictWriter(content, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(findings.rows)
        write_whole(path, content.getvalue())
        files.append(path)
    for title, figure in findings.figures.items():
        for ending in ("png", "svg"):
            path = folder / f"{title}.{ending}"
            metadata = {"Date": None} if ending == "svg" else None
            with whole_file(path) as file:
                figure.savefig(file, format=ending, dpi=DPI, metadata=metadata)
            files.append(path)
        _close(figure)
    for title, text in findings.files.items():
        write_whole(folder / title, text)
        files.append(folder / title)
    return files


def _close(figure: object) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)  # type: ignore[arg-type]
