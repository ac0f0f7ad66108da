"""Commands that print tables end quietly when their reader closes, as with ``| head``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import rest_slow

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SOURCES = {path.stem: path.read_text() for path in TOOLS.glob("*.py")}
COMMANDS = sorted(
    name
    for name, source in SOURCES.items()
    if "usage: python" in source[:600] and "__main__" in source
)


@pytest.mark.parametrize(
    "command", rest_slow(["doctor", *COMMANDS], {"doctor", *COMMANDS} - {"search"})
)
def test_a_closed_pipe_ends_a_command_silently(command):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        typed = [sys.executable, TOOLS / f"{command}.py", "--help"]
        run = subprocess.run(typed, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert run.stderr == ""
    # A command that writes files continues without its printed lines.
    writes_files = "writes_files=True" in SOURCES[command]
    assert run.returncode == (0 if writes_files else -signal.SIGPIPE)


def test_all_commands_with_tables_are_found():
    assert {"benchmark", "complexity", "lipschitz"} <= set(COMMANDS)
