"""Commands continue if standard streams are closed or full, unless lines are their result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, warnings
from tools.cli.command import exit_with

def main():
    for stream in (sys.stdout, sys.stderr):
        print("line", file=stream, flush=True)
    warnings.warn("slow")
    with open(sys.argv[1], "w") as file:
        assert file.fileno() > 2
        file.write("result")
    print("line")
    return 0

exit_with(main, writes_files={writes_files})
"""


def run_redirected(tmp_path, redirected, *, writes_files):
    """Return status and stderr of a program with redirected streams, and its file."""
    script, result = tmp_path / "program.py", tmp_path / "result"
    script.write_text(PROGRAM.format(writes_files=writes_files))
    words = ["bash", "-c", f'{sys.executable} "$@" {redirected}', "bash", script, result]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr, result.read_text() if result.exists() else None


@pytest.mark.parametrize(
    "redirected",
    [">&-", "> /dev/full", "| true; exit ${PIPESTATUS[0]}", ">&- 2>&- <&-", "> /dev/full 2>&1"],
)
def test_a_command_that_writes_files_only_loses_its_lines(redirected, tmp_path):
    status, err, result = run_redirected(tmp_path, redirected, writes_files=True)
    assert (status, result) == (0, "result")
    assert err in ("line\nwarning: slow\n", "")


def test_a_command_whose_lines_are_its_result_ends_where_they_are_lost(tmp_path):
    status, err, _ = run_redirected(tmp_path, "> /dev/full", writes_files=False)
    assert status != 0
    assert "No space left on device" in err
    redirected = "| true; exit ${PIPESTATUS[0]}"
    status, err, _ = run_redirected(tmp_path, redirected, writes_files=False)
    assert status in (0, 141)  # true may end after the last line
    assert "Traceback" not in err


def test_a_current_folder_that_was_removed_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM.format(writes_files=True))
    script = f'cd {tmp_path}/gone; rmdir {tmp_path}/gone; exec {sys.executable} "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", tmp_path / "program.py", tmp_path / "other"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current folder was removed")
    assert len(done.stderr.splitlines()) == 1
