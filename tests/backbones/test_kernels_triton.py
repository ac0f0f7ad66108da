"""The Triton kernels: numbers in Triton's interpreter, machine code for a GPU, and their place."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from backbones.fast import library, operators_serve, status, switched_off, trial
from backbones.fast.base import product_dtype
from backbones.fast.triton import choice, operators
from tests.forms import build_fast, compiled

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def untried(monkeypatch):
    """A GPU with Triton on which nothing has been tried, as far as the choice can see."""
    pytest.importorskip("triton", reason="there is no Triton for this torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choice, "_failures", {})
    monkeypatch.delenv(library.SWITCH, raising=False)
    return monkeypatch


@pytest.mark.slow
def test_kernels_equal_torch_in_the_interpreter():
    pytest.importorskip("triton", reason="there is no Triton for this torch")
    command = [sys.executable, "-m", "tests.backbones.interpreted_kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 4


TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Compiler:
    """Stands for a kernel and compiles what it is called with, for a GPU that need not be here."""

    def __init__(self, kernel, made):
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | constants
        types = {
            name: f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
            for name, value in values.items()
        } | dict.fromkeys(constants, "constexpr")
        code = triton.compile(
            ASTSource(self.kernel, types, constants), target=GPUTarget("cuda", 80, 32)
        )
        self.made.setdefault(self.kernel.__name__, []).append(len(code.asm["cubin"]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernels_compile_for_a_gpu(monkeypatch, dtype):
    pytest.importorskip("triton", reason="there is no Triton for this torch")
    from backbones.fast.triton import branched, gated, stencil

    made = {}
    for module, names in (
        (gated, ["_gate"]),
        (stencil, ["_stencil_backward"]),
        (
            branched,
            ["_moments_kernel", "_convolve_kernel", "_norm_gelu_kernel", "_activate_back_kernel"],
        ),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Compiler(getattr(module, name), made))
    trial.difference(choice.forms(), torch.device("cpu"), dtype)
    assert len(made) == 6
    assert all(size > 1000 for sizes in made.values() for size in sizes)


@compiled
def test_signatures_equal_those_of_the_compiled_operators():
    for schema in operators.SCHEMAS:
        name = schema.partition("(")[0]
        assert str(getattr(torch.ops.mixerlab, name).default._schema) == f"mixerlab::{schema}"


def test_a_failure_warns_once_and_torch_is_used(untried):
    tried = []

    def fail(*arguments):
        tried.append(arguments)
        raise RuntimeError("no kernel image for this device\nmore")

    untried.setattr(choice, "implement", fail)
    with pytest.warns(UserWarning, match="do not serve on cuda:0.*no kernel image for this device"):
        assert not choice.serve(GPU, torch.float32, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not choice.serve(GPU, torch.float32, True)
    assert len(tried) == 1
    assert "on CUDA torch's own operations (cuda:0 in torch.float32: Run" in status()


@pytest.mark.parametrize("found", [0.2, float("nan")])
def test_kernels_with_other_numbers_are_rejected(untried, found):
    from contextlib import nullcontext

    untried.setattr(choice, "implement", lambda key: None)
    untried.setattr(torch.cuda, "device", nullcontext)
    untried.setattr(trial, "difference", lambda forms, device, dtype: found)
    with pytest.warns(UserWarning, match="their numbers differ by"):
        assert not choice.serve(GPU, torch.bfloat16, True)
    untried.setattr(choice, "_failures", {})
    untried.setattr(trial, "difference", lambda forms, device, dtype: 0.01)
    assert choice.serve(GPU, torch.bfloat16, True)
    with pytest.warns(UserWarning, match=r"in torch.float64.*by 1.0e-02"):
        assert not choice.serve(GPU, torch.float64, True)


def test_autocast_graphs_and_status(untried):
    x = torch.randn(2, 3)
    assert product_dtype(x) is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x) is product_dtype(x.bfloat16()) is torch.bfloat16
        assert product_dtype(x.double()) is torch.float64
    untried.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choice.serve(GPU, torch.float32, True)
    assert not choice._failures  # it will be tried later
    assert status().endswith("; on CUDA Triton kernels, in eager passes")
    untried.setattr(choice, "find_spec", lambda name: None)
    assert "there is no Triton" in status()
    assert not choice.serve(GPU, torch.float32, True)
    untried.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" not in status()


@on_gpu
@pytest.mark.parametrize("dtype", choice.DTYPES, ids=str)
def test_kernels_serve_on_a_gpu(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operators_serve(torch.empty(1, device="cuda", dtype=dtype))


@on_gpu
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["afbo", "iffn_bn"])
def test_mixers_on_a_gpu_equal_torch(name, cast):
    mixer = build_fast(name, 96).float().cuda().eval()
    x = torch.randn(3, 19, 21, 96, device="cuda", requires_grad=True)
    results = []
    for is_off in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            if is_off:
                with switched_off():
                    y = mixer(x)
            else:
                assert mixer.is_fast(x)
                y = mixer(x)
        leaves = [x, *mixer.parameters()]
        results.append([y, *torch.autograd.grad(y.float().square().mean(), leaves)])
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype
        scale = other.float().abs().max()
        difference = (one.float() - other.float()).abs().max() / scale
        assert difference < (0.05 if cast else 5e-3)  # torch's convolutions may be TF32


@on_gpu
@pytest.mark.parametrize("name", ["afbo", "iffn_bn"])
def test_kernels_are_recorded_in_a_graph(name):
    mixer = build_fast(name, 32).float().cuda().eval()
    x = torch.randn(2, 7, 7, 32, device="cuda")
    with torch.inference_mode():
        expected = mixer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mixer(x)
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, expected)
