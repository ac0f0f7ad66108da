"""Checks of the lists of entries in annotation files, such as COCO's images and categories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.files.integers import format_value
from datamodules.files.text_files import nfc

Entry = dict[str, Any]
Values = Mapping[str, Mapping[str, Callable[[Any], Any]]]


def check_entries(
    path: Path, content: Any, required: Mapping[str, Sequence[str]], values: Values, files: str
) -> dict[str, list[Entry]]:
    """Return the content of an annotation file after a check of all entries and their values.

    Args:
        path: The file, for messages.
        content: Its parsed content.
        required: Keys that the entries of each list must have.
        values: Converters by list and key; they raise ``ValueError`` for a wrong value.
        files: Name of this file format in messages.

    Raises:
        ValueError: An entry is wrong; the message names its position.
    """
    for kind, keys in required.items():
        if not isinstance(content, dict) or not isinstance(content.get(kind), list):
            found = f"a {type(content).__name__}"
            if isinstance(content, dict):
                found = format_value(sorted(map(str, content)))
            raise ValueError(
                f"{path} lacks the list {kind!r}; {files} need {list(required)}, found {found}"
            )
        for index, entry in enumerate(content[kind]):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise ValueError(
                    f"{path}: {kind}[{index}] lacks {missing}, got {format_value(entry)}"
                )
        _convert(path, kind, content[kind], values[kind])
    return dict(content)


def _convert(
    path: Path, kind: str, entries: list[Entry], values: Mapping[str, Callable[[Any], Any]]
) -> None:
    for index, entry in enumerate(entries):
        key = ""
        try:
            for key, converted in values.items():
                if key in entry:
                    entry[key] = converted(entry[key])
        except ValueError as error:
            raise ValueError(f"{path}: {kind}[{index}]: {key} {error}") from None


def text_value(value: object) -> str:
    """Return a non-empty string that files and logs can store.

    Raises:
        ValueError: The value is of another kind. The message continues the value's name.
    """
    if isinstance(value, str) and value != "" and "\0" not in value:
        return value
    raise ValueError(f"must be a non-empty string, got {format_value(value)}")


def name_value(value: object) -> str:
    """Return the name of a class in NFC.

    Raises:
        ValueError: The value is empty or of another type.
    """
    return nfc(text_value(value))
