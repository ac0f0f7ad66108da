"""Mixers under what torch does to functions: derivatives of all kinds, batches of calls, traces.

An operator or an in-place form would serve none of these; every registered mixer has to step aside.
"""

import contextlib
import functools
import re
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from backbones.fast import switched_off
from backbones.layers.recomputation import recompute
from tests.forms import FORMS, build_fast, compiled, every_form
from tests.tensors import build_mixer, tokens

DIM, MAP = 8, (4, 5)
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
# torch's fused attention has first derivatives only.
pytestmark = pytest.mark.usefixtures("_written_out_attention")
MODES = [contextlib.nullcontext, torch.no_grad]
# By default each form takes one of both modes.
modes_by_turns = pytest.mark.parametrize(
    ("name", "form", "mode"),
    [
        pytest.param(*case, mode, marks=() if turn == mode else pytest.mark.slow)
        for case, turn in zip(FORMS, cycle(MODES), strict=False)
        for mode in MODES
    ],
)


def build(name, form):
    return form(build_mixer(name, DIM, grid=MAP))


@pytest.fixture
def _written_out_attention():
    with sdpa_kernel(SDPBackend.MATH):
        yield


def given(batch=2):
    return tokens(batch, *MAP, DIM), torch.randn(batch, *MAP, DIM, dtype=torch.float64)


def backwards(mixer, x, direction):
    with torch.enable_grad(), switched_off():
        x, v = x.clone().requires_grad_(), torch.zeros_like(x).requires_grad_()
        (gradient,) = torch.autograd.grad(mixer(x), x, v, create_graph=True)
        return torch.autograd.grad(gradient, v, direction)[0]


@modes_by_turns
def test_derivatives_forwards_and_batches_of_calls(name, form, mode):
    mixer, (x, direction) = build(name, form).eval(), given()
    expected = backwards(mixer, x, direction)
    with mode():
        y, derivative = torch.func.jvp(mixer, (x,), (direction,))
        close(derivative, expected)
        close(y, mixer(x))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(mixer(forward_ad.make_dual(x, direction)))
            close(dual.tangent, expected)
    mixer, x = build(name, form).eval(), torch.stack([given()[0] for _ in range(3)])
    with mode():
        close(torch.func.vmap(mixer)(x), torch.stack([mixer(one) for one in x]))


@every_form
def test_gradients_of_functions_and_in_many_directions(name, form):
    mixer, (x, _) = build(name, form).eval(), given()
    leaf = x.clone().requires_grad_()
    mixer(leaf).sin().sum().backward()
    close(torch.func.grad(lambda x: mixer(x).sin().sum())(x), leaf.grad)
    mixer, (x, _) = build(name, form), given(2)
    leaf = x.clone().requires_grad_()
    leaves = (leaf, *mixer.parameters())
    with switched_off():
        y = mixer(leaf)
    directions = torch.randn(3, *x.shape, dtype=x.dtype)
    at_once = torch.autograd.grad(
        y, leaves, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    for index, direction in enumerate(directions):
        alone = torch.autograd.grad(y, leaves, direction, retain_graph=True, allow_unused=True)
        for one, all_of_it in zip(alone, at_once, strict=True):
            close(None if all_of_it is None else all_of_it[index], one)


@pytest.mark.parametrize("is_recomputed", [False, True])
@every_form
def test_gradients_of_gradients_without_operators(name, form, is_recomputed):
    mixer, (x, direction) = build(name, form).eval(), given(1)
    mixer.train(is_recomputed)  # nothing is recomputed in evaluation
    names = dict(mixer.named_parameters())

    def curvature(mixer):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)  # of noise in training
        with switched_off():
            y = mixer(leaf).sin().sum()
        (gradient,) = torch.autograd.grad(y, leaf, create_graph=True)
        leaves = (leaf, *names.values())
        return torch.autograd.grad((gradient * direction).sum(), leaves, allow_unused=True)

    (along, *others) = curvature(mixer)
    if is_recomputed:
        close(curvature(recompute(mixer)), (along, *others))
        return
    step = 1e-5 * direction
    there, back = (
        torch.func.grad(lambda x: mixer(x).sin().sum())(x + sign * step) for sign in (1, -1)
    )
    torch.testing.assert_close(along, (there - back) / 2e-5, rtol=1e-4, atol=1e-6)


@every_form
def test_operators_name_unsupported_gradients(name, form):
    mixer, (x, _) = build(name, form), given(2)
    y, directions = mixer(x.requires_grad_()), torch.randn(3, *x.shape, dtype=x.dtype)
    try:
        at_once = torch.autograd.grad(y, x, directions, retain_graph=True, is_grads_batched=True)
    except RuntimeError as error:
        assert re.fullmatch(  # noqa: PT017
            r"mixerlab::\w+ has no gradients in many directions at once; compute what shall be "
            r"differentiated so under `with backbones\.fast\.switched_off\(\):`",
            str(error).splitlines()[0],
        )
    else:
        close(at_once[0][2], torch.autograd.grad(y, x, directions[2])[0])


class Quantised(Tensor):
    """A weight that says how it is multiplied, as quantised ones do."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += func is torch.nn.functional.linear
        return super().__torch_function__(func, types, args, kwargs)


@every_form
def test_weights_of_another_class_multiply_themselves(name, form):
    mixer, (x, _) = build(name, form).eval(), given()
    layers = [part for part in mixer.modules() if isinstance(part, nn.Linear)]
    with torch.no_grad():
        expected = mixer(x)
        for layer in layers:
            value = layer.weight.detach().as_subclass(Quantised)
            layer.weight = nn.Parameter(value, requires_grad=False)
        Quantised.asked = 0
        close(mixer(x).as_subclass(Tensor), expected)
    assert Quantised.asked >= len(layers)


@compiled
def test_a_recomputed_mixer_is_fast_as_it_was(monkeypatch):
    mixer, (x, _), calls = build_fast("afbo", DIM, grid=MAP), given(), []
    compute = type(mixer).compute
    monkeypatch.setattr(type(mixer), "compute", lambda *a: calls.append(1) or compute(*a))
    recompute(mixer.train())(x.requires_grad_()).sum().backward()
    assert len(calls) == 2
