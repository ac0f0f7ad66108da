"""Packages called tests and tools that are somebody else's, on the path as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rows
from tools.papers import published

ROOT = Path(__file__).resolve().parents[2]


def test_ours_are_found():
    """Also by the pytest that the next test starts, with others on the path."""
    assert Path(rows.__file__) == ROOT / "tests" / "rows.py"
    assert Path(published.__file__) == ROOT / "tools" / "papers" / "published.py"


@pytest.fixture(params=["first", "last"])
def environment(request, tmp_path):
    """Return an environment with the other packages first or last on the path."""
    others = tmp_path / "site-packages"
    for package in ("tests", "tools"):
        (others / package).mkdir(parents=True)
        (others / package / "__init__.py").write_text("raise ImportError('this is another one')")
    if request.param == "last":
        # What PYTHONPATH names comes before the installed packages, so it is appended.
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(others)!r})")
        return {**os.environ, "PYTHONPATH": str(tmp_path)}
    return {**os.environ, "PYTHONPATH": str(others)}


def ended(command, environment, cwd):
    """Run Python without the current folder on its path."""
    command = [sys.executable, "-P", *command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_command_finds_ours(environment, tmp_path):
    run = ended([str(ROOT / "tools" / "results.py"), "--help"], environment, tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "usage: python tools/results.py" in run.stdout


def test_others_in_front_of_ours_are_named(tmp_path):
    """A folder without ``__init__.py`` counts as none beside ours."""
    others = tmp_path / "others"
    for file in ("heads/__init__.py", "datamodules/a.py"):
        (others / file).parent.mkdir(parents=True)
        (others / file).touch()
    paths = os.pathsep.join(map(str, (others, ROOT)))
    run = ended(["-c", "import datamodules, tasks"], {**os.environ, "PYTHONPATH": paths}, tmp_path)
    other, ours = others / "heads", ROOT / "heads"
    assert f"import heads finds {other} instead of MixerLab's {ours}; rename" in run.stderr
