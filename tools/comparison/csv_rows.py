"""CSV files of rows that a model describes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from backbones.options.schemas import validate
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_csv

M = TypeVar("M", bound=BaseModel)


def read_models(path: Path, model: type[M]) -> Iterator[M]:
    """Yield the rows of a file.

    Raises:
        FileNotFoundError: The path does not exist.
        DamagedFile: A row fails the checks of the model.
    """
    names, *lines = [line for line in read_csv(path) if line] or [[]]
    for line in lines:
        try:
            yield validate(model, dict(zip(names, line, strict=True)))
        except ValueError as error:
            raise DamagedFile(f"{path} is damaged: {error}") from None


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a file with the given columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
