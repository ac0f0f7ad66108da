"""A copy of the checkout for tests that add files to it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copied(copy):
    """The checkout's files in another folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def start(copy, *words):
    """Start Python with these words in a copy."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy),
                   "MIXERLAB_CACHE": str(copy / "cache")}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *words], cwd=copy, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def output(copy, *words):
    """Return what Python prints with these words in a copy."""
    started = start(copy, *words)
    out, err = started.communicate()
    assert started.returncode == 0, (out + err)[-3000:]
    return out
