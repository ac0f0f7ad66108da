"""Runs the scan's Triton kernels in Triton's interpreter, on a CPU, and compares them with torch.

usage: python -m tests.backbones.interpreted_scan

A process of its own: the interpreter is chosen before Triton is imported, for good.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import functools

import torch

from backbones import create_mixer
from backbones.fast import fast, switched_off, trial
from backbones.fast.torch import scan as form
from backbones.fast.triton import scan as kernels
from tests.tensors import tokens

CPU = torch.device("cpu")
SIZES = [(2, 1), (33, 3, 7), (97, 130), (64, 2)]  # tokens, lanes
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def check_sizes():
    """One chunk and several, the last one short, lanes that fill no block; in the trial's form."""
    for size in (*SIZES, form.TRIED):
        form.TRIED = size
        for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            difference = trial.largest_difference(form.compare_with_torch(CPU, dtype))
            assert difference.share < limit, str(difference)


def check_operator():
    """Its schema, gradients and fake implementation agree: torch's own check."""
    arguments = torch.randn(2, 40, 3, dtype=torch.float64).requires_grad_().unbind(0)
    torch.library.opcheck(torch.ops.mixerlab.linear_scan, arguments)


def check_mixers():
    """Eager and compiled as one graph by the kernel, exported and switched off by torch."""
    launches, launch = [], kernels._launch
    kernels._launch = lambda *given, **named: launches.append(1) or launch(*given, **named)
    form.choice.serve = lambda kernel, device, dtype: True
    form.FastScan.serves = lambda self, _, values: form.kernel_serves(values.device, values.dtype)
    for name in ("ss2d", "bi_wkv"):
        mixer = fast(create_mixer(name, 8, grid=(5, 7))).double()
        x, results = tokens(2, 5, 7, 8).requires_grad_(), []

        def step(network, x=x, mixer=mixer, results=results):
            launches.clear()
            y = network(x)
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *mixer.parameters()])])
            return len(launches)

        assert step(mixer) == step(torch.compile(mixer, fullgraph=True, backend="aot_eager")) == 2
        with switched_off():
            assert step(mixer) == 0
        close(*results[:2])
        close(*results[1:])
        graph = torch.export.export(mixer, (x,)).graph
        assert "linear_scan" not in str(graph)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kernels.library.impl("linear_scan", kernels.forward, "CPU")
    kernels.library.impl("linear_scan_backward", kernels.backward, "CPU")
    for check in (check_sizes, check_operator, check_mixers):
        check()
        print(f"{check.__name__} passed")
