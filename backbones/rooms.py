"""Import of the files that register themselves; errors name the file and the line."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


class BrokenFileError(ImportError):
    """Import error in a file of a room; the message is ``file:line: type: text``."""


def import_files(room: str) -> None:
    """Import every file of a room.

    Args:
        room: Package that is being imported, such as ``backbones.mixers``.

    Raises:
        BrokenFileError: An error while one of them is imported.
    """
    for found in pkgutil.iter_modules(sys.modules[room].__path__, f"{room}."):
        try:
            importlib.import_module(found.name)
        except BrokenFileError:  # from a room that this file imports
            raise
        except Exception as error:
            place, text = _place(error) or found.name, str(error)
            if isinstance(error, SyntaxError):
                text = error.msg  # str() would repeat the place
            raise BrokenFileError(f"{place}: {type(error).__name__}: {text}") from error


def _place(error: Exception) -> str:
    """Return file and line of a failed import; empty if no file of ours was executed.

    The file is the one being imported, not the registry or a library that it calls.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_ours(error.filename):
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_ours(f.filename)]
    files = [frame.filename for frame in frames if frame.name == "<module>"]
    if not files:
        return ""
    line = [frame.lineno for frame in frames if frame.filename == files[-1]][-1]
    return f"{_short(files[-1])}:{line}"


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE)


def _short(file: str) -> Path:
    """Return a path relative to the folder that contains the package."""
    return Path(file).relative_to(PACKAGE.parent)
