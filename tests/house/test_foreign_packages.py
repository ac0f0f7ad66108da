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


@pytest.mark.parametrize(
    ("name", "imported", "file"), [("heads", "tasks", "__init__.py"), ("tasks", "tools", "a.py")]
)
def test_others_in_front_of_ours_are_named(name, imported, file, tmp_path):
    """Also a folder without ``__init__.py``, where ours is an editable install."""
    other = tmp_path / "others" / name
    other.mkdir(parents=True)
    (other / file).touch()
    code = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Installed:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, path or [{str(ROOT)!r}])\n"
        "sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Installed)\n"
        f"import {imported}"
    )
    run = ended(["-c", code], {**os.environ, "PYTHONPATH": str(other.parent)}, tmp_path)
    assert f"import {name} finds {other} instead of MixerLab's {ROOT / name}; rename" in run.stderr
