import os
import unicodedata

import pytest

from datamodules.annotation_formats.yolo import describe_yaml
from datamodules.files import text_files
from datamodules.files.text_files import FolderNames, read_csv, read_json, read_lines, read_text
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


def test_latin1_is_logged_with_its_line(tmp_path, logged):
    file = tmp_path / "names.txt"
    file.write_bytes(b"cat\n" + b"x" * 50 + b" caf\xe9 \x80\ndog\n")
    assert read_lines(file)[1].endswith("café €")
    (line,) = logged
    assert str(file) in line
    assert "Latin-1 (line 2: xxxxxxxxxxxxxxxx café €)" in line


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


def test_long_fields_of_csv(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,b\n1," + "x" * 200_000 + "\n")
    assert len(read_csv(file)[0]["b"]) == 200_000


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", ValueError), ("", ValueError), ("none", FileNotFoundError)):
        with pytest.raises(error, match=str(tmp_path / name)):
            read_text(tmp_path / name)
    with pytest.raises(ValueError, match="device"):
        read_text(tmp_path.__class__("/dev/zero"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a.jpg", "a.jpg"),
        ("./a.jpg", "a.jpg"),
        (".//b/./a.jpg", "b/a.jpg"),
        ("b\\a.jpg", "b/a.jpg"),
        (".\\b\\a.jpg", "b/a.jpg"),
        ("b/../a.jpg", "b/../a.jpg"),
        ("c\\d.jpg", "c\\d.jpg"),  # the name of one file
        ("b/c.jpg", None),
        ("b/", None),
        ("", None),
        ("../../none/a.jpg", None),
        ("//", None),
        ("a/" * 5000, None),
        ("a\0.jpg", None),
    ],
)
def test_files_by_the_names_of_lists(tmp_path, given, found):
    for name in ("a.jpg", "b/a.jpg", "c\\d.jpg", "c/d.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert FolderNames(tmp_path).find(given) == found
    assert FolderNames(tmp_path).find(f"{tmp_path}/b/a.jpg") == f"{tmp_path}/b/a.jpg"


def test_accents_in_names_of_files(tmp_path):
    folder = unicodedata.normalize("NFD", "été")
    (tmp_path / folder).mkdir()
    for name in (*NFD[:2], NAMES[2]):
        (tmp_path / folder / name).touch()
    names = FolderNames(tmp_path)
    expected = [f"{folder}/{name}" for name in (*NFD[:2], NAMES[2])]
    for given in (NAMES, NFD):
        assert [names.find(f"été/{name}") for name in given] == expected
    assert names.on_disk("été/cafe") == "été/cafe"
    (tmp_path / folder / NAMES[0]).touch()  # both spellings exist
    names = FolderNames(tmp_path)
    assert names.find(f"été/{NAMES[0]}") == f"{folder}/{NAMES[0]}"
    assert names.find(f"été/{NFD[0]}") == f"{folder}/{NFD[0]}"
