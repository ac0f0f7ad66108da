"""Text, YAML and JSON of run folders and caches, of bounded size, depth and expansion."""

from __future__ import annotations

import csv
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES, MOST_ENTRIES, DEEPEST = 2**24, 200_000, 50
# The parser in C, which every wheel of PyYAML has, takes an eighth of the time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PLAIN = (str, int, float, bool, type(None))


class DamagedFile(ValueError):
    """A file that cannot be read or holds something else than it should; the text names it."""


def read_text(path: Path, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """Read a file of UTF-8 without waiting for pipes and devices.

    Raises:
        FileNotFoundError: The path does not exist.
        DamagedFile: It is a folder, link, pipe or device, too large, or not UTF-8.
    """
    if path.is_symlink():
        raise DamagedFile(f"{path} is a link, which is not followed")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DamagedFile(f"{path} cannot be read (it is a folder, pipe or device)")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror})") from error
    if len(raw) > most:
        raise DamagedFile(f"{path} cannot be read (it has more than {most:,} bytes)")
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} cannot be read (byte {error.start} is not UTF-8)") from error


def read_json(path: Path, most: int = MOST_BYTES, entries: int = MOST_ENTRIES) -> Any:
    """Read a file of JSON.

    Raises:
        FileNotFoundError: The path does not exist.
        DamagedFile: It cannot be read.
    """
    text = read_text(path, most)
    try:
        return _bounded(json.loads(text), entries)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read ({_line(error)})") from error


def read_yaml(path: Path) -> Any:
    """Read a file of YAML that holds plain values.

    Raises:
        FileNotFoundError: The path does not exist.
        DamagedFile: It cannot be read.
    """
    text = read_text(path)
    try:
        _check_events(text)
        return _bounded(yaml.load(text, LOADER))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise DamagedFile(f"{path} cannot be read ({_line(error)})") from error


def read_csv(path: Path, most: int = MOST_BYTES) -> Iterator[list[str]]:
    """Yield the cells of each line; empty for lines that are not csv.

    Bytes that are not UTF-8 are replaced.

    Raises:
        FileNotFoundError: The path does not exist.
        DamagedFile: It cannot be read.
    """
    for line in read_text(path, most, "replace").split("\n"):
        try:
            yield next(csv.reader([line]), [])
        except csv.Error:  # such as a cell of more than 131,072 characters
            yield []


def _check_events(text: str) -> None:
    """Refuse deep nesting and merged keys before anything is made of them."""
    depth = 0
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and event.value == "<<":
            raise ValueError("it merges keys by <<; write them out")
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _bounded(content: Any, entries: int = MOST_ENTRIES) -> Any:
    """Return a content of plain values, with what aliases repeat counted each time."""
    budget, branches = entries, [(0, content)]
    while branches:
        depth, value = branches.pop()
        budget -= 1
        if depth > DEEPEST or budget < 0:
            raise ValueError(
                f"it is nested deeper than {DEEPEST} levels or has more than {entries:,} entries"
            )
        if isinstance(value, dict):
            branches += [(depth + 1, item) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            branches += [(depth + 1, item) for item in value]
        elif not isinstance(value, PLAIN):
            raise ValueError(f"it holds a {type(value).__name__}, not plain values")
        elif type(value) is int and abs(value) >= 2**64:
            raise ValueError("it holds a number of more than 64 bits")
    return content


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or "it is nested too deeply"
