"""Runs the Triton kernels in Triton's interpreter, on a CPU, and compares them with torch.

usage: python -m tests.backbones.interpreted_kernels

A process of its own: the interpreter is chosen before Triton is imported, for good.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import functools
import sys

import pytest
import torch

from backbones.fast import base, fast, switched_off
from backbones.fast.cpu.iffn import operands
from backbones.fast.trial import difference
from backbones.fast.triton import choice, operators
from backbones.mixers.afbo.variants import afbo, scfbo_gc
from tests.both_ways import both_ways
from tests.tensors import build_mixer, tokens

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def serve_on_cpu():
    """Put the kernels behind the operators' names for CPU tensors, with gradients in Python."""
    assert "backbones.fast.triton.gated" not in sys.modules, "Triton is loaded by backbones"
    base.load = str  # as if a compiled library were there
    operators.define()
    choice.implement("CPU")


@contextlib.contextmanager
def programs(count):
    """Set the number of programs: one takes many lines, hundreds take one or two each."""
    from backbones.fast.triton import parts

    before, parts.ENOUGH_PROGRAMS = parts.ENOUGH_PROGRAMS, count
    yield
    parts.ENOUGH_PROGRAMS = before


def check(mixer, enough, *inputs):
    """Compare outputs, gradients and statistics, and inference, with torch's."""
    with programs(enough):
        close(*both_ways(mixer, *inputs))
        with torch.inference_mode():
            found = mixer.eval()(*inputs)
            with switched_off():
                close(found, mixer(*inputs))


def check_afbo():
    """Odd sizes, one image, class tokens, channels that fill no block, columns that go round."""
    for factory, size, batch, prefix, enough in (
        (afbo, (1, 1), 1, 0, 1),
        (scfbo_gc, (5, 3), 1, 2, 400),
        (afbo, (19, 2), 2, 1, 1),
        (scfbo_gc, (2, 18), 1, 0, 1),
    ):
        torch.manual_seed(0)
        options = {"g1": 4} if factory is scfbo_gc else {"g2": 3, "bias": size != (19, 2)}
        mixer = fast(factory(20, **options)).double()
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        x = tokens(batch, size[1], size[0], 20).transpose(1, 2)  # not contiguous
        check(mixer, enough, x, *([tokens(batch, prefix, 20)] if prefix else []))


def check_iffn():
    """Evaluation and training, two and four branches, as above."""
    for options, size, batch, training, enough in (
        ({"n_branches": 4, "hidden_ratio": 2.9, "bn_out": False}, (5, 3), 1, True, 400),
        ({}, (19, 2), 2, True, 1),
        ({}, (2, 18), 1, False, 1),
    ):
        mixer = fast(build_mixer("iffn_bn", 40 if options else 12, **options)).train(training)
        check(mixer, enough, tokens(batch, size[1], size[0], 40 if options else 12).transpose(1, 2))


def check_types():
    """Run the trial that precedes the first use on a GPU: all types, and its own equations."""
    cpu, forms = torch.device("cpu"), choice.forms()
    with programs(1):
        assert difference(forms, cpu, torch.float64) < 1e-10
        assert difference(forms, cpu, torch.float32) < 2e-5
        assert 1e-4 < difference(forms, cpu, torch.bfloat16) < 0.06
        assert 1e-5 < difference(forms, cpu, torch.float16) < 0.01


def check_operators():
    """Their schemas and gradients agree: torch's own check."""
    mixer = build_mixer("iffn_bn", 8)
    first, coefficients, norms, running, eps, _, depthwise, last = operands(mixer)
    x = tokens(2, 6, 8).requires_grad_()
    arguments = (x, 2, 3, *first, coefficients, norms, running, *eps, True)
    with programs(1):
        tests = ("test_schema", "test_autograd_registration")
        opcheck = functools.partial(torch.library.opcheck, test_utils=tests)
        opcheck(torch.ops.mixerlab.branched_mixer.default, (*arguments, *depthwise, *last, True))
    x = x.detach()
    weights = [torch.randn(12, 8).double().requires_grad_() for _ in range(2)]
    taps = [torch.randn(12, 1, 3, 3).double().requires_grad_() for _ in range(2)]
    proj = torch.randn(8, 12).double().requires_grad_()
    arguments = (x, 2, 2, 2, weights, [0, 0, 1, 4], None, None, *taps, None, None, proj, None)
    with programs(1):
        opcheck(torch.ops.mixerlab.gated_mixer.default, (*arguments, True))
        y, _ = torch.ops.mixerlab.gated_mixer(*arguments, True)
    with pytest.raises(RuntimeError, match=r"switched_off\(\)"):
        torch.autograd.grad(y.square().sum(), proj, create_graph=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_on_cpu()
    for run in (check_afbo, check_iffn, check_types, check_operators):
        run()
        print(f"{run.__name__} passed", flush=True)
