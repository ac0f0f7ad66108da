"""Logs of a training: metrics.csv and TensorBoard's events."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from tasks.engine.run_folder.atomic_writes import make_folder, write_whole
from tasks.engine.run_folder.schemas import read_rows

logger = logging.getLogger(__name__)

Row = dict[str, Any]
LEAST_SPACE = 2**16  # bytes; logs of other programs are written in blocks of up to 32 KiB
__all__ = ["CsvLog", "Row", "RunLog", "TensorBoardLog", "read_rows"]


def check_free(folder: Path) -> None:
    """Raise an ``OSError`` if a disk is full, for programs that write in the background."""
    if shutil.disk_usage(folder).free < LEAST_SPACE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class RunLog(Logger):
    """Base of both logs: files in the run folder, continued by a resumed run."""

    @property
    def name(self) -> str:
        """No subfolder."""
        return ""

    @property
    def version(self) -> str:
        """No subfolder."""
        return ""

    def resume_at(self, step: int, *, validates: bool = False) -> None:
        """Forget what was logged from this step on: it comes again.

        Args:
            step: Optimiser steps done.
            validates: True if the validation after the last of them is repeated, too.
        """
        raise NotImplementedError

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Skip them: config.yaml has them."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the remaining rows."""
        self.save()


class CsvLog(RunLog):
    """metrics.csv: one row per logged step, with the columns of all rows.

    Args:
        path: The file.
        flush_every: Rows between two writes.
    """

    def __init__(self, path: str | Path, flush_every: int = 50) -> None:
        super().__init__()
        self.path = Path(path)
        self.flush_every = flush_every
        self._columns: list[str] = []
        self._pending: list[Row] = []
        self._last: Row = {}  # the last row that was written,
        self._last_start = self._size = 0  # where it begins, and where the file ends

    @rank_zero_only
    def resume_at(self, step: int, *, validates: bool = False) -> None:
        """Keep the rows before this step; a line that was cut off goes with the others."""
        table = [] if self.path.is_symlink() else read_rows(self.path)  # a file replaces the link
        rows = [row for row in table if row["step"] < step]
        if validates and rows and rows[-1]["step"] == step - 1:
            # Its figures have the number of the step that it follows, and maybe that step's row.
            last = {k: v for k, v in rows.pop().items() if not k.startswith("val/")}
            rows += [last] * bool(last.keys() - {"step", "epoch"})
        self._write_all(rows)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics of a step, which share a row."""
        if self._pending and self._pending[-1]["step"] == step:
            self._pending[-1].update(metrics)
            return
        if len(self._pending) >= self.flush_every:
            self.save()
        self._pending.append({"step": step, **metrics})

    @rank_zero_only
    def save(self) -> None:
        """Append the new rows; more of the last step replaces its row.

        For a new column, or if another program changed the file, it is rewritten.
        """
        if not self._pending:
            return
        try:
            size = self.path.stat().st_size if self.path.exists() else -1
            is_new = any(key not in self._columns for row in self._pending for key in row)
            if size == self._size and not is_new:
                start = self._size
                if self._pending[0]["step"] == self._last.get("step"):
                    self._pending[0], start = {**self._last, **self._pending[0]}, self._last_start
                self._write_from(start, [_line(row, self._columns) for row in self._pending])
            else:
                rows = read_rows(self.path)
                if rows and rows[-1]["step"] == self._pending[0]["step"]:
                    self._pending[0] = {**rows.pop(), **self._pending[0]}
                self._write_all([*rows, *self._pending])
            self._last = self._pending[-1]
        except OSError as error:
            # A full disk must not end a training whose checkpoints may lie elsewhere.
            reason = error.strerror or error
            logger.warning("%s cannot be written (%s); rows are lost", self.path, reason)
        self._pending = []

    def _write_from(self, start: int, lines: Sequence[bytes]) -> None:
        """Replace what follows ``start``; if that fails, what was there stays."""
        text = b"".join(lines)
        with open(self.path, "r+b", buffering=0, opener=_without_links) as file:
            file.seek(start)
            before = file.read()
            try:
                _put(file, start, text)  # by one system call: a kill leaves one of both rows
            except OSError:
                _put(file, start, before)
                raise
        self._size = start + len(text)
        self._last_start = self._size - len(lines[-1])

    def _write_all(self, rows: Sequence[Row]) -> None:
        columns = ["step", *sorted({key for row in rows for key in row} - {"step"})]
        lines = [_line(row, columns) for row in ({name: name for name in columns}, *rows)]
        write_whole(self.path, b"".join(lines))
        self._columns, self._last = columns, rows[-1] if rows else {}
        self._size = sum(map(len, lines))
        self._last_start = self._size - len(lines[-1])


def _line(row: Row, columns: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns).writerow(row)
    return text.getvalue().encode()


def _put(file: io.FileIO, start: int, text: bytes) -> None:
    """Let a file end with ``text`` from ``start`` on."""
    file.seek(start)
    while text:
        text = text[file.write(text) :]
    file.truncate()


class TensorBoardLog(RunLog):
    """TensorBoard's event file, alone in its folder.

    Args:
        folder: Made with the first metric.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._purge_step: int | None = None
        self._writer: Any = None
        self._failed = False

    def resume_at(self, step: int, *, validates: bool = False) -> None:
        """Hide what earlier files hold from this step on; a validation may come twice, equal."""
        self._purge_step = step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics of a step, until that fails for the first time."""
        if self._failed or not self.folder.parent.is_dir():
            return  # a run folder that was removed does not come back
        with self._giving_up():
            check_free(self.folder.parent)
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(make_folder(self.folder), purge_step=self._purge_step)
            for name, value in metrics.items():
                if name != "epoch":
                    self._writer.add_scalar(name, value, step)

    @rank_zero_only
    def save(self) -> None:
        """Write the queue; the file stays open, as evaluation follows training."""
        if self._writer is not None and not self._failed:
            with self._giving_up():
                self._writer.flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            reason = error.strerror or error
            logger.warning("%s cannot be written (%s); training continues", self.folder, reason)


def _without_links(path: str, flags: int) -> int:
    """Open a file, unless it is a link."""
    return os.open(path, flags | os.O_NOFOLLOW)
