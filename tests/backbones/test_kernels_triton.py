"""A Triton kernel is tried on a device before its first use; if it fails, torch serves."""

import warnings
from contextlib import nullcontext

import pytest
import torch

from backbones.fast import status
from backbones.fast.trial import Result
from backbones.fast.triton import choice
from backbones.fast.triton.choice import try_all
from backbones.layers.eager import SWITCH

GPU = torch.device("cuda", 0)
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@pytest.fixture
def untried(monkeypatch):
    """A GPU with Triton on which nothing has been tried, as far as the choice can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    monkeypatch.setattr(choice, "_failures", {})
    monkeypatch.setattr(choice, "_kernels", {})
    monkeypatch.delenv(SWITCH, raising=False)
    return monkeypatch


def make_kernel(name, error):
    """A kernel whose second result is wrong by an error in one place; an exception is raised."""

    def results(device, dtype):
        if isinstance(error, Exception):
            raise error
        right = torch.ones(2, 3, dtype=torch.float64)
        wrong = right.clone()
        wrong[1, 2] += error
        yield Result("output", right, right)
        yield Result("gradient of x", wrong, right)

    return choice.register_kernel(choice.Kernel(name, results, LIMITS))


def test_a_failure_warns_once_and_torch_is_used(untried):
    broken = make_kernel("broken", RuntimeError("no kernel image for this device\nmore"))
    message = "kernel broken does not serve on cuda:0.*no kernel image for this device"
    with pytest.warns(UserWarning, match=message):
        assert not choice.serve(broken, GPU, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not choice.serve(broken, GPU, torch.float32)
        assert choice.serve(make_kernel("scan", 0), GPU, torch.float32)
    assert (
        "; on CUDA Triton kernels (broken, scan); without broken on cuda:0 in torch.f" in status()
    )


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_kernels_with_other_numbers_are_rejected(untried, error):
    make_kernel("other", error)
    text = rf"other .*: gradient of x differs by .*{error:.1e} of .*, at \[1, 2\]: .* instead of 1"
    with pytest.warns(UserWarning, match=text):
        try_all(GPU)
    assert set(choice._failures) == {("other", GPU, dtype) for dtype in LIMITS}
    close = make_kernel("close", 0.01)
    assert choice.serve(close, GPU, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"in torch.float32.*by 1.0e-02"):
        assert not choice.serve(close, GPU, torch.float32)


def test_kernels_are_tried_only_where_they_may_serve(untried):
    kernel = make_kernel("scan", 0)
    assert not choice.serve(kernel, GPU, torch.float16)
    untried.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choice.serve(kernel, GPU, torch.float32)
    untried.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    untried.setenv(SWITCH, "off")
    assert not choice.serve(kernel, GPU, torch.float32)
    untried.delenv(SWITCH)
    untried.setattr(choice, "find_spec", lambda name: None)
    assert not choice.serve(kernel, GPU, torch.float32)
    assert "there is no Triton" in status()
    assert not choice._failures  # it will be tried later
    untried.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" not in status()
