"""Operators for layers that stand apart equal torch's, and serve where they are faster."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from backbones import kernels
from backbones.kernels.batched import batched
from backbones.kernels.linear import act, linear, linear_act
from backbones.layers import batched_products
from backbones.layers import linear as choice
from backbones.layers.activations import ACTIVATIONS, GELU
from backbones.layers.pointwise import PointwiseConv2d
from tests.tensors import build_mixer, tokens

compiled = pytest.mark.skipif(
    not kernels.is_available(), reason=f"no compiled operators: {kernels.status()}"
)
# Rows of one image or none, of many pieces, columns that fill no vector, sums in several passes.
SHAPES = [((1, 7, 5), 3), ((5,), 3), ((0, 4), 6), ((0, 40), 64), ((2, 3, 9), 33), ((1500, 40), 17)]
SHAPES += [((19, 600), 70), ((96, 32), 64), ((3, 0), 4)]


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
@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [((16, 100), (128, 64), None), ((16, 4), (128, 64), None), ((16, 64), (128, 64), (64,)),
     ((16, 64), (128, 64), (1,)), ((16, 64), (64,), None)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("more", [(), ("gelu",)], ids=str)
def test_other_shapes_are_refused(more, x, weight, bias):
    given = [None if shape is None else tokens(*shape) for shape in (x, weight, bias)]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cannot multiply|does not fit"):
        (linear_act if more else linear)(*given, *more)


@compiled
def test_unknown_activations_are_refused():
    with pytest.raises(RuntimeError, match="'elu'; one of gelu, silu and relu"):
        linear_act(tokens(2, 3), tokens(4, 3), None, "elu")


@compiled
@torch.no_grad()
def test_what_lies_elsewhere_in_memory_is_read_right():
    weight, bias = tokens(6, 8), tokens(12, seed=2)[::2]
    one = tokens(8, 1).t()  # whose rows, of which there is one, are a number apart
    for x in (tokens(1, 8).expand(4, 8), tokens(8, 9).t(), tokens(20, 8)[::2], one):
        torch.testing.assert_close(
            linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-10, atol=1e-10
        )


@compiled
@torch.no_grad()
def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="cannot multiply"):
        batched(tokens(2, 3, 4), tokens(2, 5, 4))
    with pytest.raises(RuntimeError, match="does not fit"):
        batched(tokens(2, 3, 4), tokens(2, 4, 5), tokens(4))


@compiled
def test_a_bias_alone_may_learn(monkeypatch):
    monkeypatch.setattr(torch.ops.mixerlab, "has_tiles", lambda: True)
    leaves = [tokens(6, 5), tokens(4, 5, seed=2), tokens(4, seed=3).requires_grad_()]
    choice.linear_act(*leaves, "gelu").sum().backward()
    assert leaves[2].grad is not None
    mix, group, bias = tokens(2, 3, 4), tokens(2, 4, 5), tokens(3, 1).requires_grad_()
    batched_products.batched_products(mix, group, bias).sum().backward()
    assert bias.grad is not None


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
    torch.testing.assert_close(ours(x[0]), theirs(x[0]), rtol=1e-10, atol=1e-10)
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


@compiled
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@torch.no_grad()
def test_a_layer_with_its_activation_equals_torchs(act, shape, out, has_bias):
    x, weight = 3 * tokens(*shape), tokens(out, shape[-1], seed=2)
    bias = tokens(out, seed=3) if has_bias else None
    expected = ACTIVATIONS[act](F.linear(x, weight, bias))
    torch.testing.assert_close(linear_act(x, weight, bias, act), expected, rtol=1e-10, atol=1e-10)
    short = linear_act(*(None if t is None else t.float() for t in (x, weight, bias)), act)
    rounding = max(1e-5, 2.5e-7 * shape[-1])  # of sums of so many numbers, by any BLAS
    torch.testing.assert_close(short, expected.float(), rtol=1e-5, atol=rounding)
    assert choice.linear_act(x, weight, bias, act).shape == expected.shape


@compiled
@pytest.mark.parametrize("act", ACTIVATIONS)
@torch.no_grad()
def test_an_activation_of_what_is_no_number_or_has_no_end(act):
    """GELU and SiLU of -inf, -inf times 0, are no numbers to torch, and 0 to us."""
    x = torch.tensor([torch.nan, torch.inf, 1e30, 5.6, 0.0, -5.6, -3e38, -torch.inf])[:, None]
    expected = ACTIVATIONS[act](x)
    expected[1], expected[-1] = torch.inf, 0  # with AVX-512 torch has no number there either
    for out in (1, 40):  # one by one, and in vectors
        found = linear_act(x, torch.ones(out, 1), None, act)
        torch.testing.assert_close(
            found, expected.expand(8, out), rtol=1e-6, atol=3e-7, equal_nan=True
        )


@compiled
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@torch.no_grad()
def test_threads_share_products_of_any_size(threads):
    """Panels for each thread, or shares of their rows, in one pass or several."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, depth, out in ((300, 600, 24), (40, 600, 96), (200, 100, 150), (9, 2000, 40)):
            x, weight, bias = tokens(rows, depth), tokens(out, depth, seed=2), tokens(out, seed=3)
            for dtype, rounding in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
                given = [t.to(dtype) for t in (x, weight, bias)]
                torch.testing.assert_close(
                    linear(*given).double(), F.linear(x, weight, bias), rtol=0, atol=rounding
                )
    finally:
        torch.set_num_threads(before)


@compiled
def test_a_layer_goes_in_one_step_with_its_activation(monkeypatch):
    calls = []
    counted = lambda *given: calls.append(1) or linear_act(*given)  # noqa: E731
    serves = kernels.multiplies_without_gradient
    monkeypatch.setattr("backbones.kernels.library.multiplies", kernels.serves)
    monkeypatch.setattr(choice, "FASTER_ACT", [(serves, counted)])
    layer, x = choice.Linear(5, 6, dtype=torch.float64), tokens(3, 5)
    expected = F.silu(F.linear(x, layer.weight, layer.bias))
    seen = []
    for grad, hook, count in ((False, False, 1), (True, False, 0), (False, True, 0)):
        calls.clear()
        handle = layer.register_forward_hook(lambda *_: seen.append(1)) if hook else None
        with torch.set_grad_enabled(grad):
            found = choice.layer_act(layer, x, "silu")
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert (len(calls), found.requires_grad) == (count, grad)
        if handle is not None:
            handle.remove()
    assert seen
    plain = nn.Linear(5, 6, dtype=torch.float64)
    calls.clear()
    with torch.no_grad():
        choice.layer_act(plain, x, "silu")
    assert not calls


@compiled
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (3, 5, 7, 2), (2, 196, 196, 24), (4, 9, 9, 0)], ids=str
)
def test_batched_products_equal_torchs(sizes, has_bias, monkeypatch):
    groups, rows, depth, columns = sizes
    left, right = tokens(groups, rows, depth), tokens(groups, depth, columns, seed=2)
    bias = tokens(rows, 1, seed=3) if has_bias else None
    expected = left @ right + (0 if bias is None else bias)
    torch.testing.assert_close(batched(left, right, bias), expected, rtol=1e-10, atol=1e-10)
    calls = []
    serves = kernels.multiplies_without_gradient
    monkeypatch.setattr("backbones.kernels.library.multiplies", kernels.serves)
    monkeypatch.setattr(
        batched_products, "FASTER", [(serves, lambda *given: calls.append(1) or batched(*given))]
    )
    for needs, count in ((False, 1), (True, 1)):  # the operator has no gradient
        found = batched_products.batched_products(left.requires_grad_(needs), right, bias)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert len(calls) == count


@compiled
def test_operators_without_a_gradient_know_their_sizes_and_counts():
    with FlopCounterMode(display=False) as counter:
        linear_act(torch.ones(3, 4), torch.ones(5, 4), None, "gelu")
        batched(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert counter.get_total_flops() == 2 * 3 * 4 * 5 + 2 * 2 * 3 * 4 * 5
    for operator, given in (
        (
            torch.ops.mixerlab.linear_act,
            (torch.ones(3, 4), torch.ones(5, 4), torch.ones(5), "silu"),
        ),
        (torch.ops.mixerlab.batched, (torch.ones(2, 3, 4), torch.ones(2, 4, 5), None)),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@compiled
@torch.no_grad()
def test_an_activation_alone_keeps_the_order_in_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "backbones.layers.activations.FASTER",
        [(kernels.activates, lambda *given: calls.append(1) or act(*given))],
    )
    x, module = 3 * tokens(2, 5, 4, 7), GELU()
    for given, count in (
        (x, 1),
        (x.contiguous(memory_format=torch.channels_last), 1),
        (x[:, ::2], 0),  # with gaps
        (x.bfloat16(), 0),
        (x[:0], 1),
    ):
        calls.clear()
        found, expected = module(given), F.gelu(given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert (found.stride(), len(calls)) == (expected.stride(), count)
    with torch.enable_grad():
        assert module(x.requires_grad_()).requires_grad
    with pytest.raises(RuntimeError, match="without gaps"):
        act(x[:, ::2], "gelu")
    torch.library.opcheck(torch.ops.mixerlab.act, (x.detach(), "relu"))


@compiled
@pytest.mark.parametrize("record", [True, False])
def test_weights_without_values_are_refused_as_torch_does(record):
    layer = choice.Linear(8, 4, device="meta")
    with torch.set_grad_enabled(record), pytest.raises(RuntimeError, match="meta"):
        layer(torch.ones(2, 3, 3, 8))
    for name in ("afbo", "iffn", "sbm"):
        mixer = build_mixer(name).float().to("meta")
        with torch.set_grad_enabled(record), pytest.raises(RuntimeError):
            mixer(torch.ones(2, 3, 3, 8))


@compiled
@torch.no_grad()
@pytest.mark.parametrize(("name", "part"), [("afbo", "proj"), ("iffn", "fc1"), ("sbm", "norm")])
def test_a_forward_put_on_a_part_is_called(name, part):
    mixer, x = build_mixer(name), tokens(1, 6, 5, 8)
    module, calls = getattr(mixer, part), []
    plain = module.forward
    module.forward = lambda given: calls.append(1) or plain(given)
    mixer(x)
    assert calls
