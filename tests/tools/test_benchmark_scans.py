"""tools/benchmark.py scans: loops compute what the mixers do, and are timed."""

import json

import pytest
import torch

from tools import benchmark
from tools.bench.scans import SCANS, make_inputs


@pytest.mark.parametrize("name", SCANS)
def test_loops_compute_the_same(name):
    inputs = [x.double().requires_grad_() for x in make_inputs(name, 70, 8)]
    outputs = [form(*inputs) for form in SCANS[name]]
    torch.testing.assert_close(*outputs)
    gradients = (torch.autograd.grad(y.sin().sum(), inputs) for y in outputs)
    torch.testing.assert_close(*gradients)


def test_scans_are_timed(capsys):
    typed = ["scans", "tokens=70", "dim=8", "rounds=2", "train=true", "format=json"]
    assert benchmark.main(typed) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(one["mixer"], one["step"]) for one in records] == [
        (name, kind) for name in SCANS for kind in ("forward", "training")
    ]
    assert all(one["ratio"] > 0 and one["loop_ms"] > 0 for one in records)
    assert benchmark.main([*typed, "mixer=ss2d,afno"]) == 2
    assert "mixer must be one or more of ss2d, bi_wkv, " in capsys.readouterr().err
