"""Commands that print tables end quietly when their reader closes, as with ``| head``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import timm_slots

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SOURCES = {path.stem: path.read_text() for path in TOOLS.glob("*.py")}
COMMANDS = sorted(
    name
    for name, source in SOURCES.items()
    if "usage: python" in source[:600] and "__main__" in source
)


@pytest.mark.parametrize("command", ["doctor", "results", "analyse"])
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


def test_all_commands_end_by_the_same_function():
    assert {"benchmark", "complexity", "lipschitz"} <= set(COMMANDS)
    assert not [name for name in COMMANDS if "    exit_with(main" not in SOURCES[name]]


@pytest.mark.parametrize(
    ("form", "rows"),
    [("table", ["model channel token keeps its own", "efficientnet_b1 0 1", "test_vit 6 6"]),
     ("families", ["family models channel token example", "efficientnet 1 0 1 efficientnet_b1",
                   "vision_transformer 1 1 1 test_vit"])],
)  # fmt: skip
def test_timm_slots_prints_its_rows(form, rows, capsys):
    assert timm_slots.main(["model=test_vit,efficientnet_b1", "try=false", f"format={form}"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == rows
