"""Find what files declare, and import them when it is named; errors name the file and the line."""

from __future__ import annotations

import functools
import importlib
import re
import traceback
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent


class BrokenFileError(ImportError):
    """Import error whose message names the file, as ``file:line: type: text``, or the package."""


@functools.cache
def read_declarations(package: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """Return module and text of each line that declares something, without importing any file.

    Args:
        package: Name of a package beside this one, such as ``datamodules``, or below it.
        pattern: Regular expression with one group, the text to return.

    Returns:
        Declarations in the order in which an import of all files makes them: files and folders are
        sorted, and those that one of them imports come before it.
    """
    imports = re.compile(rf"^from {re.escape(package)}\.(\w+)", re.MULTILINE)
    rooms: dict[str, dict[str, str]] = {}
    for module, file in _files(package).items():
        text = file.read_text(encoding="utf-8", errors="replace")
        rooms.setdefault(module.removeprefix(f"{package}.").split(".")[0], {})[module] = text
    declarations: list[tuple[str, str]] = []

    def add(room: str) -> None:
        texts = rooms.pop(room, {})
        for imported_room in imports.findall("\n".join(texts.values())):
            add(imported_room)
        for module, text in texts.items():
            declarations.extend((module, name) for name in re.findall(pattern, text, re.MULTILINE))

    while rooms:
        add(next(iter(rooms)))
    return tuple(declarations)


def _files(package: str) -> dict[str, Path]:
    """Return the files of a package and of those below it, by module and sorted."""
    root = PACKAGE.parent
    files = sorted(root.joinpath(*package.split(".")).rglob("*.py"))
    names = (".".join(file.relative_to(root).with_suffix("").parts) for file in files)
    return dict(zip((name.removesuffix(".__init__") for name in names), files, strict=True))


def import_files(package: str) -> None:
    """Import every file of a package and of those below it.

    Raises:
        BrokenFileError: A file fails to import.
    """
    for module in _files(package):
        import_file(module)


def import_file(module: str) -> ModuleType:
    """Import a module of this package by its full name.

    Raises:
        BrokenFileError: Its file, or one that it imports, fails.
    """
    try:
        return importlib.import_module(module)
    except BrokenFileError:  # from another file that this one imports
        raise
    except Exception as error:
        location, text = _location(error) or module, str(error)
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
