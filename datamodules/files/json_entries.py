"""Check the lists of entries in annotation files, such as COCO's images and categories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.files.text_files import nfc
from datamodules.files.whole_numbers import shown

Entry = dict[str, Any]
Values = Mapping[str, Mapping[str, Callable[[Any], Any]]]


def check_entries(
    path: Path, content: Any, required: Mapping[str, Sequence[str]], values: Values, files: str
) -> dict[str, list[Entry]]:
    """Return the content of an annotation file after a check of all entries and their values.

    Args:
        path: The file, for messages.
        content: Its content.
        required: Keys that the entries of each list must have.
        values: By list and key what converts a value; raises ``ValueError`` for a wrong one.
        files: What messages call files of this format.

    Raises:
        ValueError: Names the position of the first entry that is wrong.
    """
    for kind, keys in required.items():
        if not isinstance(content, dict) or not isinstance(content.get(kind), list):
            found = f"a {type(content).__name__}"
            if isinstance(content, dict):
                found = shown(sorted(map(str, content)))
            raise ValueError(
                f"{path} has no list {kind!r}; {files} need {list(required)}, found {found}"
            )
        for index, entry in enumerate(content[kind]):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise ValueError(
                    f"entry {index} of {kind!r} in {path} lacks {missing}: {shown(entry)}"
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
    """Return a text that is not empty and that files and logs can hold.

    Raises:
        ValueError: Anything else. The message follows the name of the value.
    """
    if isinstance(value, str) and value != "" and "\0" not in value:
        return value
    raise ValueError(f"must be a text that is not empty, got {shown(value)}")


def name_value(value: object) -> str:
    """Return the name of a class in NFC.

    Raises:
        ValueError: It is not a text, or empty.
    """
    return nfc(text_value(value))
