"""Plain and fast forms of mixers, for tests that hold for both."""

import contextlib
import copy

import pytest
import torch

from backbones import create_mixer, list_mixers
from backbones.fast import FastModule, fast, is_available, plain, status, switched_off
from tests.tensors import build_mixer

compiled = pytest.mark.skipif(not is_available(), reason=f"no compiled operators: {status()}")


def is_fast(name):
    """Return True if a mixer has a fast form, as a whole or of a part."""
    return any(isinstance(part, FastModule) for part in fast(create_mixer(name, 8)).modules())


# Every mixer as it is built, and those that differ also in their fast form.
FORMS = [
    (name, form)
    for name in list_mixers()
    for form in (plain, fast)
    if form is plain or is_fast(name)
]
every_form = pytest.mark.parametrize(
    ("name", "form"), FORMS, ids=[f"{name}-{form.__name__}" for name, form in FORMS]
)
both_forms = pytest.mark.parametrize("form", [plain, fast], ids=["plain", "fast"])


def build_fast(name, *args, **options):
    """Build a mixer with random weights in its fast form."""
    return fast(build_mixer(name, *args, **options))


@torch.enable_grad()
def both_ways(module, *inputs, call=lambda module, *inputs: module(*inputs)):
    """Return outputs, all gradients and buffers, by the operators and without them."""
    results = []
    for is_off in (False, True):
        own = copy.deepcopy(module)
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        with switched_off() if is_off else contextlib.nullcontext():
            x = leaves[0] if leaves[0].ndim == 4 else leaves[0][:, :1, None]
            assert own.is_fast(x) is not is_off
            found = call(own, *leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        generator = torch.Generator().manual_seed(1)
        probes = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *own.parameters()], probes)
        results.append([*outputs, *gradients, *own.buffers()])
    return results
