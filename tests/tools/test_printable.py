"""Control characters and very long lines of foreign files never reach a terminal."""

import logging

import pytest

from tools.cli.command import run_command
from tools.cli.errors import one_line_errors
from tools.cli.printable import PrintableFormatter, printable
from tools.cli.tables import write
from tools.comparing.run_records import find_runs
from tools.comparing.side_by_side import tell
from tools.runs.outcome import FAILURE, read_failure

RAW, SHOWN = "a\x1b[31m\r\x9b\u202e\tb", r"a\x1b[31m\r\x9b\u202e" + "\tb"


def test_letters_stay_and_control_characters_are_escaped():
    assert printable("é 中文 😀\n\t") == "é 中文 😀\n\t"
    assert printable(RAW) == SHOWN
    assert printable("x" * 10**6, 9) == "x" * 9 + "... (1,000,000 characters)"


def refuse(*_):
    raise ValueError(RAW)


def test_every_way_to_the_terminal_escapes(capsys, tmp_path):
    run_command("a.py", None, refuse, ["x"])
    tell(RAW)
    for form in ("table", "csv"):
        write([{"name": RAW}], form, {"name": ("name", "{}")})
    with pytest.raises(SystemExit), one_line_errors():
        find_runs([RAW])
    said = capsys.readouterr()
    assert said.out.count(SHOWN) == 2
    assert said.err.count(SHOWN) == 3
    record = logging.LogRecord("a", 20, "a.py", 1, "%s", (RAW,), None)
    assert PrintableFormatter("%(message)s").format(record) == SHOWN
    (tmp_path / FAILURE).write_text("x" * 3_000_000)
    assert len(read_failure(tmp_path)) < 1_100


def test_a_home_that_does_not_exist_is_named(capsys):
    run_command("results.py", None, find_runs, ["~nobody-of-that-name/runs"])
    assert "a path begins with ~ and an unknown user" in capsys.readouterr().err
