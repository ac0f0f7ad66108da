import os
import unicodedata

import pytest

from datamodules.annotation_formats.yolo import describe_yaml
from datamodules.files import text_files
from datamodules.files.text_files import read_csv, read_json, read_lines, read_text
from tests.errors import refuses

NAMES = ["café", "naïve art", "zèbre"]
NFD = [unicodedata.normalize("NFD", name) for name in NAMES]
YAML = "has YAML aliases|is not valid YAML"
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(text_files, "log", lines.append)
    return lines


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lists_in_any_encoding(tmp_path, logged, encoding, end):
    file = tmp_path / "names.txt"
    file.write_bytes((end.join(NAMES) + end * 2).encode(encoding))
    assert read_lines(file) == NAMES
    assert len(logged) == (encoding == "latin-1")


def test_names_are_composed_and_lines_end_at_newlines_only(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("\n".join([*NFD, "a\u2028b", "c\x0cd", "", "e"]), encoding="utf-8")
    assert read_lines(file) == [*NAMES, "a\u2028b", "c\x0cd", "", "e"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_in_any_encoding(tmp_path, encoding, logged):
    file = tmp_path / "a.json"
    file.write_bytes('{"names": ["café", "cat"]}'.encode(encoding))
    assert read_json(file) == {"names": ["café", "cat"]}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, '{"é": '.encode(), r"not valid JSON: .* at byte 7 of 7; it may be cut off"),
        (read_json, '{"é": '.encode("utf-16"), r"at byte 14 of 14"),
        (read_json, b"[" * 100_000, "nested too deeply|not valid JSON"),
        (read_json, b"[" + b"9" * 5000 + b"]", "4300 digits"),
        (read_json, b"", "byte 0 of 0"),
        (read_json, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not a text file"),
        (read_json, b"cat\0dog", "is not a text file"),
        (read_csv, b"", "is empty"),
        (read_csv, b"\n\n", "is empty"),
        (read_csv, b"a,b\n1,2\n1\n", "row 3: 1 cells, but the first row names 2 columns"),
        (read_csv, b"a,a\n1,2\n", "different columns"),
        (read_csv, b",a\n0,1\n", "different columns, got"),
        (describe_yaml, b"names: &a [*a]", YAML),
        (describe_yaml, b"a: &a [x]\nb: [*a, *a]", YAML),
        (describe_yaml, b"names: " + b"[" * 10**4, YAML),
    ],
)
def test_faults_of_text_files(tmp_path, read, content, message):
    file = tmp_path / "data"
    file.write_bytes(content)
    refuses(rf"^{file}.*({message})", read, file)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path, encoding, delimiter, logged):
    file = tmp_path / "a.csv"
    rows = [["filename", " café"], ['"a ""b"", c"', "1"], ["", ""], ["d", " 0 "]]
    file.write_bytes("\r\n".join(delimiter.join(row) for row in rows).encode(encoding))
    if delimiter == ",":
        assert read_csv(file)[0] == {"filename": 'a "b", c', "café": "1"}
    assert [row["café"] for row in read_csv(file)] == ["1", "0"]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", ValueError), ("", ValueError), ("none", FileNotFoundError)):
        with pytest.raises(error, match=str(tmp_path / name)):
            read_text(tmp_path / name)
    with pytest.raises(ValueError, match="device"):
        read_text(tmp_path.__class__("/dev/zero"))
