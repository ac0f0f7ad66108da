"""A note in the run folder tells a failed run from an interrupted one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tasks.engine.plain_files import read_text
from tools.cli.errors import user_message
from tools.cli.printable import printable

FAILURE = "error.txt"


@contextlib.contextmanager
def recording_failure(folder: Path) -> Iterator[None]:
    """Write the message of an error into the run folder; a signal writes none.

    The note of an earlier attempt is removed.
    """
    note = folder / FAILURE
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        record_failure(folder, user_message(error) or str(error) or type(error).__name__)
        raise


def record_failure(folder: Path, text: str) -> None:
    """Write the note of a failure, unless another process was first."""
    # Where nothing can be written, a full disk may be the error itself.
    with (
        contextlib.suppress(OSError),
        (folder / FAILURE).open("x", encoding="utf-8", errors="backslashreplace") as note,
    ):
        note.write(f"{text}\n")


def read_failure(folder: Path) -> str | None:
    """Return the first line of the note, or None without a note.

    Raises:
        DamagedFile: It cannot be read.
    """
    try:
        text = read_text(folder / FAILURE, errors="replace").strip().partition("\n")[0]
    except FileNotFoundError:
        return None
    return printable(text, 1_000) or "failed"
