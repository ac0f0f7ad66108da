"""How a run that failed is told from one that was broken off: by a note in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FAILURE = "error.txt"


@contextlib.contextmanager
def failure_noted(folder: Path) -> Iterator[None]:
    """Leave the message of an error in the run folder; a signal leaves none.

    The note of an earlier attempt goes when the run goes on.
    """
    note = folder / FAILURE
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        # Where nothing can be written, a full disk may be the error itself.
        with contextlib.suppress(OSError):
            text = f"{error}\n" if str(error) else f"{type(error).__name__}\n"
            note.write_text(text, encoding="utf-8", errors="backslashreplace")
        raise


def read_failure(folder: Path) -> str | None:
    """The first line of the note, or None if there is none."""
    try:
        text = (folder / FAILURE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return text.partition("\n")[0] or "failed"
