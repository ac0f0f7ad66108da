"""The scan's Triton kernels and the trials of scans before their first use."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from backbones import create_mixer
from backbones.fast import fast, trial
from backbones.fast.torch import gated_delta
from backbones.fast.torch.scan import FastScan, kernel_serves
from backbones.mixers.recurrent.gated_delta import delta_rule
from tests.tensors import tokens

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.slow
def test_kernels_equal_torch_in_the_interpreter():
    pytest.importorskip("triton", reason="there is no Triton for this torch")
    command = [sys.executable, "-m", "tests.backbones.interpreted_scan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 3


class Compiler:
    """Stands for a kernel and compiles what it is called with, for a GPU that need not be here."""

    def __init__(self, kernel, capability, sizes):
        self.kernel, self.capability, self.sizes = kernel, capability, sizes

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {torch.float32: "*fp32", torch.float64: "*fp64"}
        values = dict(zip(self.kernel.arg_names, arguments, strict=True))
        constants = {name: values[name] for name in ("BACKWARD", "LANES", "ACC")}
        signature = {
            name: types[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for name, value in values.items()
        } | dict.fromkeys(constants, "constexpr")
        code = triton.compile(
            ASTSource(self.kernel, signature, constants),
            target=GPUTarget("cuda", self.capability, 32), options={"num_warps": num_warps},
        )  # fmt: skip
        self.sizes.append(len(code.asm["cubin"]))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu(monkeypatch, capability):
    pytest.importorskip("triton", reason="there is no Triton for this torch")
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no backend for CUDA")
    from backbones.fast.triton import scan as kernels

    sizes = []
    for name in ("_end_chunks", "_scan"):
        stand_in = Compiler(getattr(kernels, name), capability, sizes)
        monkeypatch.setattr(kernels, name, stand_in)
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(64, 3, 7, dtype=dtype)
        kernels.forward(x, x)
        kernels.backward(x, x, x)
    assert len(sizes) == 8
    assert min(sizes) > 1000


def test_a_cpu_keeps_the_scan_in_chunks():
    mixer = fast(create_mixer("ss2d", 8, grid=(4, 4)))
    (form,) = (part for part in mixer.modules() if isinstance(part, FastScan))
    assert not form.is_fast(torch.zeros(4, 3), torch.zeros(4, 3))
    assert not kernel_serves(CPU, torch.bfloat16)


class NoGradient(torch.autograd.Function):
    """The identity with NaN for a gradient, as fla's kernels had on some GPUs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


def test_a_gradient_of_nan_is_the_largest_difference():
    def form(*inputs):
        return delta_rule(*inputs[:-1], NoGradient.apply(inputs[-1]))

    inputs = gated_delta.make_inputs(4, 8)
    results = trial.compare(form, delta_rule, inputs, CPU, torch.float32)
    difference = trial.largest_difference(results)
    assert difference.name == "gradient of beta"
    assert difference.share != difference.share


@pytest.mark.parametrize(("dtype", "limit"), gated_delta.HALF.items(), ids=str)
def test_half_precision_passes_the_trial_of_the_delta_rule(dtype, limit):
    def form(*inputs):
        return delta_rule(*(x.float() for x in inputs)).to(dtype)

    results = trial.compare(form, delta_rule, gated_delta.make_inputs(12, 24), CPU, dtype)
    assert 1e-5 < trial.largest_difference(results).share < limit


@on_gpu
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["ss2d", "bi_wkv"])
def test_scans_on_a_gpu_equal_torch(name, is_compiled):
    plain = create_mixer(name, 24, grid=(19, 21)).cuda()
    results = []
    for is_fast in (False, True):
        mixer = fast(plain) if is_fast else plain
        mixer = torch.compile(mixer, fullgraph=True) if is_compiled else mixer
        x = tokens(3, 19, 21, 24).float().cuda().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            y = mixer(x)
        results.append([y, *torch.autograd.grad(y.float().sin().sum(), [x, *plain.parameters()])])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@on_gpu
def test_a_scan_is_recorded_in_a_graph():
    mixer = fast(create_mixer("ss2d", 16, grid=(9, 9))).cuda()
    x = torch.randn(2, 9, 9, 16, device="cuda")
    with torch.inference_mode():
        expected = mixer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mixer(x)
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, expected)
