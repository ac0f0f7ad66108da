"""Import files that register themselves; errors name the file and the line."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


class BrokenFileError(ImportError):
    """Import error whose message names the file, as ``file:line: type: text``, or the package."""


def import_files(package: str) -> None:
    """Import every file of a package.

    Args:
        package: Name of the package that is being imported, such as ``backbones.mixers``.

    Raises:
        BrokenFileError: A file fails to import.
    """
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except BrokenFileError:  # from another package that this file imports
            raise
        except Exception as error:
            location, text = _location(error) or module.name, str(error)
            if isinstance(error, SyntaxError):
                text = error.msg  # str() would repeat file and line
            raise BrokenFileError(f"{location}: {type(error).__name__}: {text}") from error


def _location(error: Exception) -> str:
    """Return file and line of a failed import; empty if it is outside this package.

    The file is the one being imported, even if the registry or a library raised the error.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_in_package(error.filename):
        return f"{_relative_path(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_in_package(f.filename)]
    files = [frame.filename for frame in frames if frame.name == "<module>"]
    if not files:
        return ""
    line = [frame.lineno for frame in frames if frame.filename == files[-1]][-1]
    return f"{_relative_path(files[-1])}:{line}"


def _is_in_package(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE)


def _relative_path(file: str) -> Path:
    """Return a path relative to the folder that contains the package."""
    return Path(file).relative_to(PACKAGE.parent)
