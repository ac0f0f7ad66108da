"""Files that are written whole or not at all, and never through a link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".partial"
LONGEST = 60  # characters of a file's name that its unfinished form keeps


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside ``path`` that takes its name once the block has succeeded.

    A link at ``path`` is replaced; the file that it leads to keeps its content. If the block fails,
    what was at ``path`` stays.

    Raises:
        OSError: Names the file and the reason.
    """
    partial = path.with_name(f".{path.name[:LONGEST]}{SUFFIX}")
    try:
        partial.unlink(missing_ok=True)  # what a kill left
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        stays = "; what is there stays" if os.path.lexists(path) else ""
        reason = error.strerror or error
        raise OSError(f"{path} could not be written ({reason}){stays}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text as UTF-8, or bytes, whole or not at all.

    Raises:
        OSError: Names the file and the reason.
    """
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with whole_file(path) as file:
        file.write(raw)


def is_own_file(path: Path) -> bool:
    """Return True for a regular file that is in a run folder itself, not a link, pipe or device."""
    return path.is_file() and not path.is_symlink()


def make_folder(path: Path) -> Path:
    """Make a folder inside a run folder, and return it.

    Raises:
        OSError: A link or a file is in its place.
    """
    refuse_link(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {path} cannot be made ({error.strerror})") from error
    return path


def refuse_link(path: Path) -> None:
    """Raise an ``OSError`` if a link is in the place of a file or folder of a run."""
    if path.is_symlink():
        raise OSError(f"{path} is a link and is not followed; remove it")
