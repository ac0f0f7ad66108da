"""Imports the files that register themselves, and says which one cannot be imported, and where."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


class BrokenFileError(ImportError):
    """A file of a room cannot be imported; the message is ``file:line: type: text``."""


def import_files(room: str) -> None:
    """Import every file of a room.

    Args:
        room: Its package, which is being imported, such as ``backbones.mixers``.

    Raises:
        BrokenFileError: The first one that cannot be imported, for whatever reason.
    """
    for found in pkgutil.iter_modules(sys.modules[room].__path__, f"{room}."):
        try:
            importlib.import_module(found.name)
        except BrokenFileError:  # of a room that this file imports from
            raise
        except Exception as error:
            place, text = _place(error) or found.name, str(error)
            if isinstance(error, SyntaxError):
                text = error.msg  # without the place, which str() adds
            raise BrokenFileError(f"{place}: {type(error).__name__}: {text}") from error


def _place(error: Exception) -> str:
    """Where in a file of ours an import has failed; empty if no file has been executed.

    That is the file that was being imported, not what it has called: the registry, or a library.
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
    """As it is typed in the folder that holds the package."""
    return Path(file).relative_to(PACKAGE.parent)
