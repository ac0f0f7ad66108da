"""The compiled operators equal torch's own, forward and backward, and know their place."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbones.fast import build, compiled_trial, fingerprint, library
from backbones.fast.trial import largest_difference
from tests.forms import compiled

ROOT = Path(__file__).resolve().parents[2]


def compile_nothing(monkeypatch, folder, target, **outcome):
    monkeypatch.setattr(build, "COMPILED", folder)
    monkeypatch.setattr(build, "compiled_file", lambda portable: target)
    monkeypatch.setattr(build, "find_compiler", lambda: ["true"])
    monkeypatch.setattr(build, "_run", lambda command: "")
    monkeypatch.setattr(build, "SOURCES", folder)

    def tried(command, **options):
        Path(command[-1]).touch()
        return subprocess.CompletedProcess(command, **{"returncode": 0, "stdout": "\n"} | outcome)

    build.find_torch()
    monkeypatch.setattr(build.subprocess, "run", tried)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ({"stdout": "act differs from torch's by 1e-01\n"}, "made wrong code .* act differs"),
        ({"returncode": 1, "stderr": "...\nOSError: no symbol"}, "cannot be used: OSError: no sym"),
        ({"returncode": -11, "stderr": ""}, "cannot be used: status -11"),
    ],
)
def test_a_library_that_fails_its_trial_is_removed(monkeypatch, tmp_path, outcome, message):
    old = tmp_path / "torch-1-x-y-old.so"
    old.touch()
    compile_nothing(monkeypatch, tmp_path, tmp_path / "torch-1-x-y-new.so", **outcome)
    assert re.search(message, build.build())
    assert list(tmp_path.iterdir()) == [old]


@compiled
@pytest.mark.parametrize(
    "dtype", compiled_trial.LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_the_trial_detects_wrong_numbers(monkeypatch, dtype):
    limit = compiled_trial.LIMITS[dtype]
    with torch.no_grad():
        results = [[result] for result in compiled_trial.results(dtype)]
    assert all(largest_difference(result).share < limit / 4 for result in results)
    for (result,) in results:
        wrong = result.computed.clone()
        wrong[(-1,) * wrong.ndim] += 1e-3 * max(result.least, result.expected.abs().max())
        other = [result._replace(computed=wrong), *results[0]]
        difference = largest_difference(other)
        assert difference.share > limit
        assert difference.name == result.name
        assert difference.place == tuple(length - 1 for length in wrong.shape)


IN_PLACE = {
    "nothing": lambda path: None,
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "text": lambda path: path.write_text("no library"),
    "empty": Path.touch,
    "torch's library": lambda p: p.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so"),
    "half": lambda path: path.write_bytes(
        fingerprint.compiled_file(portable=False).read_bytes()[:500_000]
    ),
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", "not compiled for this torch"), ("FIFO", "is not a file"),
        ("folder", "is not a file"), ("dangling link", "is not a file"),
        ("text", "is not a library"), ("empty", "is not a library"),
        ("torch's library", "is another library"),
        pytest.param("half", "is incomplete", marks=compiled),
    ],
)  # fmt: skip
def test_other_files_are_named_and_left_unloaded(kind, said, monkeypatch, tmp_path):
    path = tmp_path / "operators.so"
    IN_PLACE[kind](path)
    monkeypatch.setattr(library, "compiled_file", lambda portable: path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    reason = library._load_once.__wrapped__()
    assert said in reason
    assert reason.endswith("; type: make install")


@compiled
def test_our_library_is_ours_and_defines_every_operator(monkeypatch):
    assert fingerprint.find_fault(fingerprint.compiled_file(portable=False)) == ""
    names = fingerprint.operator_names()
    assert {"has_tiles", "instructions", "gated_mixer", "star_mixer", "batched"} <= set(names)
    assert all(hasattr(torch.ops.mixerlab, name) for name in names)
    monkeypatch.setattr(library, "operator_names", lambda: [*names, "further"])
    assert "lacks the operator further; type" in library._load_once.__wrapped__()


@pytest.mark.slow
@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_portable_build_equals_torch(monkeypatch, tmp_path):
    target = tmp_path / "operators.so"
    monkeypatch.setattr(build, "COMPILED", tmp_path)
    monkeypatch.setattr(build, "compiled_file", lambda portable: target)
    assert build.build(portable=True) == ""
    code = f"""
from pathlib import Path
from backbones.fast import library
library.compiled_file = lambda portable: Path({str(target)!r} if portable else "none")
from tests.backbones import test_kernels_mixers
print(library.status())
test_kernels_mixers.test_gated_operator_equals_torch("afbo", {{}}, (1, 5, 6))
test_kernels_mixers.test_branched_operators_equal_torch("iffn", {{}}, (5, 6), True)
"""
    text = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert "compiled operators, for any processor, with the BLAS" in text
