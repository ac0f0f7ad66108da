"""Runs the Triton kernels in Triton's interpreter, on a CPU, and compares them with torch.

usage: python -m tests.backbones.interpreted_kernels

A process of its own: the interpreter is chosen before Triton is imported, for good.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import copy
import functools
import sys

import pytest
import torch

from backbones.fast import base, fast, switched_off
from backbones.fast.cpu.iffn import operands
from backbones.fast.trial import difference
from backbones.fast.triton import choice, operators
from backbones.mixers.afbo.variants import afbo, scfbo_gc
from tests.tensors import build_mixer


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


def both_ways(mixer, x, prefix):
    """Output, all gradients and running statistics, by the kernels and without them."""
    results = []
    for is_off in (False, True):
        own, leaf = copy.deepcopy(mixer), x.detach().clone().requires_grad_()
        images = leaf.transpose(1, 2)  # not contiguous
        rest = () if prefix is None else (prefix.clone().requires_grad_(),)
        with switched_off() if is_off else contextlib.nullcontext():
            assert own.is_fast(images) is not is_off
            y = own(images, *rest)
        parts = y if rest else (y,)
        probes = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in parts]
        grads = torch.autograd.grad(
            parts, [leaf, *rest, *own.parameters()], [p.to(x) for p in probes]
        )
        results.append([*parts, *grads, *own.buffers()])
        with torch.inference_mode(), switched_off() if is_off else contextlib.nullcontext():
            again = own.eval()(images, *rest)
        results[-1] += again if rest else (again,)
    return results


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
        x = torch.randn(batch, size[1], size[0], 20, dtype=torch.float64)
        rest = torch.randn(batch, prefix, 20, dtype=torch.float64) if prefix else None
        with programs(enough):
            mine, plain = both_ways(mixer, x, rest)
        for one, other in zip(mine, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def check_iffn():
    """Evaluation and training, two and four branches, as above."""
    for options, size, batch, training, enough in (
        ({"n_branches": 4, "hidden_ratio": 2.9, "bn_out": False}, (5, 3), 1, True, 400),
        ({}, (19, 2), 2, True, 1),
        ({}, (2, 18), 1, False, 1),
    ):
        mixer = fast(build_mixer("iffn", 40 if options else 12, **options)).train(training)
        x = torch.randn(batch, size[1], size[0], 40 if options else 12, dtype=torch.float64)
        with programs(enough):
            mine, plain = both_ways(mixer, x, None)
        for one, other in zip(mine, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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
    mixer = build_mixer("iffn", 8)
    first, coefficients, norms, running, eps, _, depthwise, last = operands(mixer)
    tokens = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    arguments = (tokens, 2, 3, *first, coefficients, norms, running, *eps, True)
    with programs(1):
        tests = ("test_schema", "test_autograd_registration")
        check = functools.partial(torch.library.opcheck, test_utils=tests)
        check(torch.ops.mixerlab.branched_mixer.default, (*arguments, *depthwise, *last, True))
    tokens = tokens.detach()
    weights = [torch.randn(12, 8).double().requires_grad_() for _ in range(2)]
    taps = [torch.randn(12, 1, 3, 3).double().requires_grad_() for _ in range(2)]
    proj = torch.randn(8, 12).double().requires_grad_()
    arguments = (tokens, 2, 2, 2, weights, [0, 0, 1, 4], None, None, *taps, None, None, proj, None)
    with programs(1):
        check(torch.ops.mixerlab.gated_mixer.default, (*arguments, True))
        y, _ = torch.ops.mixerlab.gated_mixer(*arguments, True)
    with pytest.raises(RuntimeError, match=r"switched_off\(\)"):
        torch.autograd.grad(y.square().sum(), proj, create_graph=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_on_cpu()
    for check in (check_afbo, check_iffn, check_types, check_operators):
        check()
        print(f"{check.__name__} passed", flush=True)
