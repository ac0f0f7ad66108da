"""Predictions on disk: rows that are written as they come, and files named after their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from tasks.engine.batches import Row
from tasks.engine.run_folder.atomic_writes import make_folder, refuse_link

ROWS = "predictions.json"
LONGEST_NAME = 255  # bytes of a file's name


class OutputFiles:
    """Files of predictions, named after their inputs.

    Args:
        folder: Folder of the predictions.
        names: Names of all inputs, which decide how much of a path a file's name needs.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        paths = [Path(name) for name in names]
        self.folder = folder
        self._stems = Counter(path.stem for path in paths)
        self._names = Counter(path.name for path in paths)
        folders = {str(path.parent) for path in paths}
        self._above = Path(os.path.commonpath(folders)) if len(folders) > 1 else Path()

    def path(self, kind: str, name: str, ending: str) -> Path:
        """Return the path of an input's file, in a folder that exists.

        Of inputs that share a name, the file keeps the ending; of those that share it as well, the
        folders.

        Args:
            kind: Sub-folder, such as "labels".
            name: Name of the input.
            ending: Last part of the file's name, such as ".png".
        """
        path = Path(name)
        stem = path.stem if self._stems[path.stem] == 1 else path.name
        inner = path.parent.relative_to(self._above) if self._names[path.name] > 1 else Path()
        if len(os.fsencode(f"{stem}{ending}")) > LONGEST_NAME:
            stem = f"{path.stem[:50]}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
        target = self.folder / kind / inner / f"{stem}{ending}"
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def relative(self, path: Path) -> str:
        """Return a file's path within the folder, as rows name it."""
        return path.relative_to(self.folder).as_posix()


class SavedRows(Sequence[Row]):
    """Rows of a predictions.json, read from the file when they are asked for.

    Args:
        file: The file, with a row per line.
        count: Number of rows.
    """

    def __init__(self, file: Path, count: int) -> None:
        self.file, self.written = file, count

    def __len__(self) -> int:
        return self.written

    def __iter__(self) -> Iterator[Row]:
        with self.file.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, 1, 1 + self.written):
                yield json.loads(line.rstrip().removesuffix(","))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            indices = range(self.written)[index]
            rows = {i: row for i, row in enumerate(self) if i in indices}
            return [rows[i] for i in indices]
        position = range(self.written)[index]
        return next(itertools.islice(self, position, None))

    def __repr__(self) -> str:
        return f"SavedRows({str(self.file)!r}, {self.written})"


@contextlib.contextmanager
def saved_rows(folder: Path) -> Iterator[Callable[[Row], SavedRows]]:
    """Write rows to a folder's predictions.json as they come, as a context manager.

    The block gets a function that writes a row and returns all rows so far. If the block fails, the
    file keeps its rows.

    Raises:
        OSError: A link is in the place of the file, or the file cannot be written.
    """
    file = make_folder(folder) / ROWS
    refuse_link(file)
    saved = SavedRows(file, 0)
    try:
        with file.open("w", encoding="utf-8", buffering=1) as out:  # line by line
            out.write("[\n")

            def add(row: Row) -> SavedRows:
                out.write((",\n" if saved.written else "") + json.dumps(row))
                saved.written += 1
                return saved

            try:
                yield add
            finally:
                out.write("\n]\n")
    except OSError as error:
        if error.filename is None:  # a full disk
            raise OSError(f"{file} could not be written ({error.strerror or error})") from error
        raise
