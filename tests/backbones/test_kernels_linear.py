"""Operators for layers that stand apart equal torch's, and serve where they are faster."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backbones.fast import fast
from backbones.fast.cpu import linear as linear_forms
from backbones.fast.cpu.linear import linear
from backbones.fast.cpu.posmlp import batched
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixers.ffn import FFN
from backbones.mixers.token_mlps.hire import HireMixer
from tests.both_ways import both_ways
from tests.forms import compiled
from tests.tensors import randomise, tokens

pytestmark = compiled
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
# Rows of one image or none, of many pieces, columns that fill no vector, sums in several passes.
SHAPES = [((1, 7, 5), 3), ((5,), 3), ((0, 4), 6), ((0, 40), 64), ((2, 3, 9), 33), ((1500, 40), 17)]
SHAPES += [((19, 600), 70), ((96, 32), 64), ((3, 0), 4)]


@pytest.fixture
def tiles(monkeypatch):
    monkeypatch.setattr(linear_forms, "has_tiles", lambda: True)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_operator_equals_torch(shape, out, has_bias):
    leaves = [tokens(*shape), tokens(out, shape[-1], seed=2)]
    leaves += [tokens(out, seed=3)] if has_bias else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    probe = tokens(*shape[:-1], out, seed=4)
    for twice in (False, True):  # a gradient that is differentiable again is another code
        ours, theirs = (
            (y, *torch.autograd.grad(y, leaves, probe, create_graph=twice))
            for y in (linear(*leaves), F.linear(*leaves))
        )
        close(ours, theirs)


@torch.no_grad()
def test_strides_are_read_and_groups_that_do_not_fit_refused():
    weight, bias = tokens(6, 8), tokens(12, seed=2)[::2]
    one = tokens(8, 1).t()  # whose rows, of which there is one, are a number apart
    for x in (tokens(1, 8).expand(4, 8), tokens(8, 9).t(), tokens(20, 8)[::2], one):
        close(linear(x, weight, bias), F.linear(x, weight, bias))
    with pytest.raises(RuntimeError, match="cannot multiply"):
        batched(tokens(2, 3, 4), tokens(2, 5, 4))
    with pytest.raises(RuntimeError, match="does not fit"):
        batched(tokens(2, 3, 4), tokens(2, 4, 5), tokens(4))


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1)], ids=str)
def test_only_gradients_that_are_asked_for(needed):
    leaves = [tokens(6, 5), tokens(4, 5, seed=2)]
    for index in needed:
        leaves[index].requires_grad_()
    linear(*leaves).square().sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [index in needed for index in (0, 1)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_pointwise_convolution_is_one(tiles, bias):
    ours = fast(PointwiseConv2d(6, 10, bias=bias, dtype=torch.float64))
    theirs = nn.Conv2d(6, 10, 1, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = tokens(2, 6, 5, 7)
    close(ours(x[0]), theirs(x[0]))
    for layout in (torch.contiguous_format, torch.channels_last):
        results = []
        for conv in (ours, theirs):
            given = x.contiguous(memory_format=layout).requires_grad_()
            assert ours.is_fast(given) == (layout is torch.channels_last)
            y = conv(given)
            results.append((y, *torch.autograd.grad(y.square().sum(), [given, *conv.parameters()])))
        close(*results)
        assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize(
    ("module", "shape"),
    [(FFN(6, act="silu"), (2, 3, 5, 6)), (HireMixer(8, 3, 1), (2, 8, 5, 7))],
    ids=lambda value: type(value).__name__,
)
def test_modules_of_linear_layers_equal_torchs(tiles, module, shape):
    close(*both_ways(fast(randomise(module)), tokens(*shape)))
