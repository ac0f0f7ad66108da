"""The operator for linear layers equals torch's, and serves 1x1 convolutions where it is faster."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backbones import kernels
from backbones.kernels.linear import linear
from backbones.layers import linear as choice
from backbones.layers.pointwise import PointwiseConv2d
from tests.tensors import tokens

compiled = pytest.mark.skipif(
    not kernels.is_available(), reason=f"no compiled operators: {kernels.status()}"
)
# Rows of one image or none, of many pieces, and columns that fill no vector.
SHAPES = [((1, 7, 5), 3), ((0, 4), 6), ((2, 3, 9), 33), ((1500, 40), 17)]


@pytest.fixture
def ours_first(monkeypatch):
    """Whatever this processor is, linear layers go to the operator; counts how many did."""
    calls = []

    def counted(*given):
        calls.append(given)
        return linear(*given)

    monkeypatch.setattr(choice, "FASTER", [(kernels.serves, counted)])
    return calls


@compiled
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
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@compiled
@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1)], ids=str)
def test_only_gradients_that_are_asked_for(needed):
    leaves = [tokens(6, 5), tokens(4, 5, seed=2)]
    for index in needed:
        leaves[index].requires_grad_()
    linear(*leaves).square().sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [index in needed for index in (0, 1)]


@compiled
@pytest.mark.parametrize("bias", [True, False])
def test_a_pointwise_convolution_is_one(ours_first, bias):
    ours = PointwiseConv2d(6, 10, bias=bias, dtype=torch.float64)
    theirs = nn.Conv2d(6, 10, 1, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = tokens(2, 6, 5, 7)
    for layout, count in ((torch.contiguous_format, 0), (torch.channels_last, 1)):
        ours_first.clear()
        results = []
        for conv in (ours, theirs):
            given = x.contiguous(memory_format=layout).requires_grad_()
            y = conv(given)
            results.append((y, *torch.autograd.grad(y.square().sum(), [given, *conv.parameters()])))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert results[0][0].stride() == results[1][0].stride()
        assert len(ours_first) == count


@compiled
def test_a_pointwise_convolution_in_a_graph_is_torchs(ours_first):
    conv = PointwiseConv2d(3, 4).eval()
    x = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    program = torch.export.export(conv, (x,))
    assert "mixerlab" not in str(program.graph)
    assert not ours_first


@compiled
def test_layers_become_faster_where_they_are(ours_first):
    layers = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4, bias=False)).double()
    x, before = tokens(2, 4), list(layers.state_dict())
    expected = layers(x)
    choice.multiply_faster(layers)
    torch.testing.assert_close(layers(x), expected, rtol=1e-10, atol=1e-10)
    assert len(ours_first) == 2
    assert list(layers.state_dict()) == before
    again = pickle.loads(pickle.dumps(layers))
    torch.testing.assert_close(again(x), expected, rtol=1e-10, atol=1e-10)
