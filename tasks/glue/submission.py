"""Predictions in the files that GLUE's server takes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasks.engine.batches import Row

MOST_SCORE = 5.0  # of STS-B


def submission_name(folder: str, source: str) -> str:
    """Return the file name of a set.

    Args:
        folder: The set's folder in GLUE's archive.
        source: Name of the file with the texts; networks of MNLI also answer AX's diagnostic.tsv.
    """
    if folder != "MNLI":
        return f"{folder}.tsv"
    if source.startswith(("diagnostic", "AX")):
        return "AX.tsv"
    return "MNLI-mm.tsv" if "mismatched" in source else "MNLI-m.tsv"


def write_submission(file: Path, rows: Iterable[Row]) -> None:
    """Write an index and a prediction per line; scores are cut to 0 to 5.

    Args:
        file: The file.
        rows: Of ``GlueTask.describe``.
    """
    with file.open("w", encoding="utf-8") as lines:
        lines.write("index\tprediction\n")
        for index, row in enumerate(rows):
            if "score" in row:
                answer = f"{min(max(row['score'], 0.0), MOST_SCORE):.4f}"
            else:
                answer = row["class"]
            lines.write(f"{index}\t{answer}\n")
