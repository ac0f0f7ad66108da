"""Evaluation cache: its entries, and every way of changing a weight invalidates them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from backbones import create_mixer
from backbones.fast import fast
from backbones.fast.eval_cache import EvalCache


class Square(nn.Module):
    """The outer product of a weight with itself; counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))
        self.cache = EvalCache()
        self.computed = 0

    def forward(self, question=None):
        return self.cache.get([self.weight], question, self._compute)

    def _compute(self):
        self.computed += 1
        return self.weight[:, None] * self.weight

    def expected(self):
        return self.weight.detach()[:, None] * self.weight.detach()


@pytest.fixture
def square():
    module = Square().eval()
    with torch.no_grad():
        module()
    assert module.computed == 1
    return module


def by_optimizer(module):
    module.weight.grad = torch.ones(3)
    torch.optim.SGD(module.parameters(), lr=0.5).step()


def by_assignment(module, values):
    module.weight = nn.Parameter(values)


def by_new_data(module):
    module.weight.data = torch.full((3,), 5.0)


CHANGES = {
    "optimizer": by_optimizer,
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.full((3,), 7.0)}),
    "data": lambda m: m.weight.data.index_fill_(0, torch.tensor([1]), 9.0),  # of the same version
    "new_data": by_new_data,
    "assignment": lambda m: by_assignment(m, torch.full((3,), 6.0)),
    "copy": lambda m: m.weight.copy_(torch.full((3,), 8.0)),
    "dtype": lambda m: m.to(torch.float64),
    "shape": lambda m: by_assignment(m, torch.ones(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_notices_a_changed_weight(square, change):
    with torch.no_grad():
        CHANGES[change](square)
        found = square()
    assert square.computed == 2
    assert found.dtype == square.weight.dtype
    torch.testing.assert_close(found, square.expected(), rtol=0, atol=0)


def test_gradients_and_inference_mode(square):
    found = square()
    assert square.computed == 2
    found.sum().backward()
    assert square.weight.grad is not None
    with torch.inference_mode():
        square("size")
    with torch.no_grad():
        torch.testing.assert_close(square("size"), square.expected())


@torch.no_grad()
def test_copies_and_derivatives_leave_the_cache_empty(square):
    for again in (copy.deepcopy(square), pickle.loads(pickle.dumps(square))):
        again()
        assert again.computed == 2
        by_new_data(again)
        torch.testing.assert_close(again(), again.expected())
    assert square.state_dict().keys() == {"weight"}
    assert square.computed == 1
    torch.testing.assert_close(square(), square.expected())
    torch.manual_seed(0)
    module = fast(create_mixer("ggqpe", 8, window=3, groups=2)).double().eval()
    x = torch.randn(1, 6, 5, 8, dtype=torch.float64)
    expected, values = module(x), {k: p.detach() for k, p in module.named_parameters()}
    steps = {k: torch.randn_like(p) for k, p in values.items()}

    def mixed(given):
        return functional_call(module, given, (x,))

    found = torch.func.jvp(mixed, (values,), (steps,))[1]
    ends = [mixed({k: values[k] + h * steps[k] for k in values}) for h in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-6)
    stacked = {k: torch.stack([p, p]) for k, p in values.items()}
    torch.testing.assert_close(torch.vmap(mixed)(stacked)[1], expected)
    torch.testing.assert_close(module(x), expected)
