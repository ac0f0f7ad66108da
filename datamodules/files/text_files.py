"""Reads text files of datasets: lists, JSON and csv in any common encoding."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from datamodules.files.console import log
from datamodules.files.decoding import plain_file
from datamodules.files.values import Text, file_errors

MARKS = (  # UTF-32's mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SAMPLED = 4096  # bytes in which UTF-16 without a mark is recognised
CONTROLS = frozenset(range(32)) - set(b"\t\n\r\f\x1a")  # Windows may end a file with 0x1A
DELIMITERS = ",;\t"
LONGEST_FIELD = 2**31 - 1  # csv refuses fields above 131,072 characters by default


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, UTF-16 or UTF-32, or in Latin-1 with a warning.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The path is a folder or device, or the content is not text.
    """
    return _decode_text(read_file(path), path)[0]


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The path is a folder, pipe or device, or cannot be read.
    """
    try:
        return plain_file(path).read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"file {path} does not exist") from None
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def text_start(raw: bytes) -> str:
    """Return the start of a file as text, to recognise its format."""
    return raw.decode(_encoding_of(raw), "replace").lstrip("\ufeff \t\r\n")


def _decode_text(raw: bytes, name: object) -> tuple[str, str]:
    """Return the text of a file's bytes, and its encoding."""
    encoding, fault = _encoding_of(raw), "it holds zero bytes"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        text, fault = "\0", f"byte {error.start} of {len(raw)} is not {encoding}"
        if encoding == "utf-8" and CONTROLS.isdisjoint(raw):
            text, encoding = _latin1(raw)
            line = text.rfind("\n", 0, error.start) + 1
            near = text[max(line, error.start - 20) : error.start + 20].split("\n")[0].strip()
            log(
                f"{name} is not UTF-8 and is read as Latin-1 (line "
                f"{text.count(chr(10), 0, line) + 1}: {near}); save it as UTF-8 if letters are "
                "wrong"
            )
    if "\0" in text:
        raise ValueError(f"{name} is not a text file: {fault}; save it as UTF-8")
    return text, encoding


def _latin1(raw: bytes) -> tuple[str, str]:
    """Return the text and encoding, in Windows-1252 first, as browsers read Latin-1."""
    try:
        return raw.decode("cp1252"), "cp1252"
    except UnicodeDecodeError:
        return raw.decode("latin-1"), "latin-1"


def _encoding_of(raw: bytes) -> str:
    for mark, encoding in MARKS:
        if raw.startswith(mark):
            return encoding
    sample = raw[:SAMPLED]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    # ASCII letters in UTF-16 have a zero byte each.
    if 4 * max(even, odd) > len(sample) and min(even, odd) * 8 < max(even, odd):
        return "utf-16-be" if even > odd else "utf-16-le"
    return "utf-8"


def read_plain_lines(path: Path) -> list[str]:
    """Return the lines of a text file as they are; a newline at its end begins no line.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a text file.
    """
    # str.splitlines would also break lines at characters that they may contain, such as U+2028.
    lines = read_text(path).rstrip("\x1a").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def read_lines(path: Path) -> list[str]:
    """Return the names in a list, one per line, stripped and in NFC; trailing empty lines drop.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a text file.
    """
    # Old Macs end lines with "\r" alone.
    lines = [nfc(name.strip()) for line in read_plain_lines(path) for name in line.split("\r")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def finite_number(text: str) -> float:
    """Return a finite number, written in digits.

    Raises:
        ValueError: The text is not a number, such as 1_000, which Python would read.
    """
    value = float(text)
    if "_" in text or not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number in digits")
    return value


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not valid JSON.
    """
    return parse_json(read_file(path), path)


def parse_json(raw: bytes, name: object) -> Any:
    """Return the content of a JSON file's bytes.

    Args:
        raw: Bytes of the file.
        name: Name of the file in messages.

    Raises:
        ValueError: The bytes are not valid JSON.
    """
    text, encoding = _decode_text(raw, name)
    with file_errors(name, " is not valid JSON:"):  # nested deeply, or with endless integers
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            position = len(text[: error.pos].encode(encoding))
            raise ValueError(
                f"{error.msg} at byte {position} of {len(raw)}; it may be cut off"
            ) from None


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a csv file by column name, stripped and in NFC.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, a column lacks a name of its own, or a row's length differs
            from the first row's.
    """
    columns: list[str] = []
    rows = []
    for _, row in csv_rows(read_text(path), path):
        if not columns:
            columns = column_names(row, path)
        else:
            fields = (nfc(field.strip()) for field in row)
            rows.append(dict(zip(columns, fields, strict=True)))
    if not columns:
        raise ValueError(f"{path} is empty; its first line must name the columns")
    return rows


def csv_rows(text: str, name: object) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a csv file that are not blank, each with its last line's number.

    The separator is the most frequent of comma, semicolon and tab in the first line. All rows have
    as many cells as the first one.

    Args:
        text: Content of the file.
        name: Name of the file in messages.

    Raises:
        ValueError: The text is not csv.
    """
    text = text.rstrip("\x1a")
    first = text.lstrip().partition("\n")[0]
    delimiter = max(DELIMITERS, key=first.count)
    reader, width = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 0
    while True:
        usual = csv.field_size_limit(LONGEST_FIELD)  # the limit is of the whole process
        try:
            row = next(reader, None)
        finally:
            csv.field_size_limit(usual)
        if row is None:
            return
        if not any(map(str.strip, row)):
            continue
        width = width or len(row)
        if len(row) != width:
            raise ValueError(
                f"{name}, row {reader.line_num}: {len(row)} cells, but the first row names "
                f"{width} columns"
            )
        yield reader.line_num, row


def column_names(row: Sequence[str], name: object) -> list[str]:
    """Return the names of columns, stripped and in NFC, from the first row of a csv file.

    Raises:
        ValueError: A column lacks a name or repeats one; the message starts with ``name``.
    """
    columns = [nfc(column.strip()) for column in row]
    if not all(columns) or len(set(columns)) < len(columns):
        raise ValueError(
            f"{name}: the first row must name different columns, got {columns}; name each, or drop "
            "one without a name (pandas' index: index=False)"
        )
    return columns


def nfc(name: str) -> str:
    """Return a name in NFC, with "é" as one character."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


Name = Annotated[Text, AfterValidator(nfc)]  # of a class, in the schema of a file


def normalise_path(name: str) -> str:
    """Return a path in NFC, with slashes, without ``./`` and doubled slashes."""
    return os.path.normpath(nfc(name.replace("\\", "/")))


class FolderNames:
    """Index of a folder's files by their names in lists and annotations.

    Names may differ from those on disk in ``./``, backslashes and the form of accents (NFC or NFD).
    A file with exactly the given name takes precedence.

    Args:
        folder: Folder that names are relative to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listed: dict[str, tuple[set[str], dict[str, str]]] = {}
        self._folders: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """Return the name on disk, relative to the folder with slashes; None if it is missing."""
        path = self._find(name)
        if path is None and "\\" in name:
            path = self._find(name.replace("\\", "/"))
        return path

    def on_disk(self, name: str) -> str:
        """Return the name on disk, or the given one if the file is missing."""
        return self.find(name) or name

    def _find(self, name: str) -> str | None:
        last = name.rpartition("/")[2]
        above = name.removesuffix(last)
        if above not in self._folders:
            place: str | None = "/" if above.startswith("/") else ""
            for part in above.split("/"):
                place = place if place is None else self._in(place, part)
            self._folders[above] = place
        parent = self._folders[above]
        return None if parent is None or not last else self._in(parent, last)

    def _in(self, parent: str, name: str) -> str | None:
        """Return the path on disk of an entry of a folder; None if it is missing."""
        if name in ("", "."):
            return parent
        exact, composed = self._list(parent)
        real = name if name in exact or name == ".." else composed.get(nfc(name))
        return real and os.path.join(parent, real)  # noqa: PTH118 - of each image

    def _list(self, parent: str) -> tuple[set[str], dict[str, str]]:
        """Return the names in a folder, listed once, as 100,000 single lookups are far slower."""
        if parent not in self._listed:
            place = self.folder / parent
            names = set(os.listdir(place)) if place.is_dir() else set()  # noqa: PTH208
            composed = {nfc(name): name for name in names if not name.isascii()}
            self._listed[parent] = names, composed
        return self._listed[parent]
