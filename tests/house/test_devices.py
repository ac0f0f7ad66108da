"""No command assumes the CPU: networks and runs on a pretended device, each in a process."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.runs import ROOT

VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])

pytestmark = pytest.mark.skipif(VERSION < (2, 9), reason="Python backends are in torch from 2.9 on")


@pytest.mark.parametrize("file", ["networks", "runs"])
@pytest.mark.parametrize(
    "marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["quick", "rest"]
)
def test_no_command_assumes_the_cpu(file, marked):
    words = ("-n0", "-q", "-p", "tests.pretended.device", f"tests/pretended/{file}.py")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-m", marked],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
