"""Conversion to fast forms and back, and the one test per call that decides between both."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrize

from backbones import create_backbone, create_mixer
from backbones.fast import FastModule, fast, plain
from backbones.layers.grouped_linear import GroupedLinear
from backbones.layers.recomputation import Recomputed, recompute
from backbones.mixers.recurrent.lstm2d import TwoWayLSTM
from tests.both_ways import both_ways
from tests.errors import refuses
from tests.families import QUICK_NAMES, build_short, meta_backbone, rest_slow
from tests.tensors import build_mixer, images, tokens

# Hosts with fast forms of their own, and mixers with one.
CONVERTED = ["deit_t_afbo", "swin_t_iffn", "posmlp_t", "sbm_t", "hiremlp_t", "ffnet_1"]


def fast_parts(network):
    return [part for part in network.modules() if isinstance(part, FastModule)]


def described(network):
    """Classes by name and all tensors, the objects themselves."""
    kinds = {name: type(part) for name, part in network.named_modules(remove_duplicate=False)}
    state = dict(network.state_dict(keep_vars=True))
    return kinds, {name: id(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("name", rest_slow([*QUICK_NAMES, *CONVERTED[1:]], CONVERTED))
def test_plain_undoes_fast(name):
    network = meta_backbone(name, fast=False)
    before = described(network)
    assert not fast_parts(network)
    converted = fast(network)
    assert name not in CONVERTED or fast_parts(converted)
    kinds, tensors = described(converted)
    assert tensors == before[1]
    assert all(issubclass(kind, before[0][part]) for part, kind in kinds.items())
    assert fast(converted) is converted
    assert described(plain(converted)) == before


def test_options_that_the_fast_form_lacks_stay_plain():
    with torch.device("meta"):
        kept = [create_mixer("ffn", 8), create_mixer("group_ffn", 8, groups=1)]
        made = create_mixer("ffn", 8, act="silu")
    assert not [part for mixer in kept for part in fast_parts(fast(mixer))]
    assert fast_parts(fast(made))


def test_backbones_are_fast_by_default_and_their_copies_stay_so():
    networks = [meta_backbone("deit_t_afbo", fast=fast) for fast in (True, False)]
    assert [len(fast_parts(network)) for network in networks] == [3 * 12, 0]  # with its mappings
    assert networks[0].record == networks[1].record
    assert networks[0].made_by == networks[1].made_by
    assert repr(networks[0]) == repr(networks[1])
    refuses(r"backbone\.fast=often", create_backbone, "deit_t", fast="often")
    network = build_short("swin_t_afbo", img_size=64)
    count = len(fast_parts(network))
    assert count
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert len(fast_parts(again)) == count
        assert list(again.state_dict()) == list(network.state_dict())


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_both_forms_give_the_same(name, training):
    network = build_short(name, img_size=64).double().train(training)
    results = []
    for form in (fast, plain):
        own, x = form(copy.deepcopy(network)), images(64, 64, batch=2)
        with torch.no_grad() if not training else contextlib.nullcontext():
            y = own.embed(x)
        gradients = torch.autograd.grad(y.sin().sum(), list(own.parameters())) if training else ()
        results.append((y, *gradients, *own.buffers()))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 3)], ids=str)
def test_lstms_of_torch_equal_the_loop(size):
    lines = fast(TwoWayLSTM(6, 4).double())
    names = [name for name, _ in nn.LSTM(6, 4, bidirectional=True).named_parameters()]
    assert [name for name, _ in lines.named_parameters()] == names
    x = tokens(2, *size[::-1], 6).transpose(1, 2)
    for found, expected in zip(*both_ways(lines, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    lines.float()
    for found, expected in zip(*both_ways(lines, x.float()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert not lines.is_fast(x.float())


@pytest.mark.parametrize("name", ["afbo", "scfbo_gc", "scfbo_oc"])
def test_one_product_equals_the_sliced_ones(name):
    mixer = fast(create_mixer(name, 24).double())
    x = tokens(2, 3, 4, 24).requires_grad_()
    for mapping in (mixer.cm_a, mixer.cm_b):
        assert not mapping.is_fast(x)  # of a CPU
        nn.init.normal_(mapping.bias)
        leaves = [x, *mapping.parameters()]
        results = [
            (y, *torch.autograd.grad(y.sin().sum(), leaves))
            for y in (mapping.compute(x), mapping(x))
        ]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_forms_share_their_state_places_and_optimisers():
    mixer = build_mixer("group_ffn")
    twin = fast(mixer.w1)
    mixer.w1.bias = nn.Parameter(torch.zeros_like(mixer.w1.bias))
    assert twin.bias is mixer.w1.bias
    mixer.eval().float()
    assert not twin.training
    assert twin.weight.dtype is torch.float32
    seen = []
    mixer.w1.register_forward_hook(lambda *_: seen.append(1))
    twin(torch.randn(2, 8))
    assert seen
    shared = GroupedLinear(4, 4, 2)
    network = fast(nn.Sequential(shared, nn.GELU(), shared))
    assert network[0] is network[2]
    assert isinstance(network[0], FastModule)
    assert plain(network)[0] is network[2]
    assert isinstance(recompute(fast(create_mixer("afbo", 8))), Recomputed)
    again = fast(nn.Sequential(fast(create_mixer("afbo", 8))))
    assert not isinstance(again[0], Recomputed)
    mixer = create_mixer("afbo", 8)
    optimiser = torch.optim.AdamW(mixer.parameters(), 0.1)
    for form in (fast, plain, fast):
        mixer = form(mixer)
        before = copy.deepcopy(mixer.state_dict())
        mixer(torch.randn(2, 3, 3, 8)).square().sum().backward()
        optimiser.step()
        assert all(not torch.equal(mixer.state_dict()[name], before[name]) for name in before)


class Quantised(Tensor):
    pass


def layer():
    return fast(GroupedLinear(4, 6, 2))


X = torch.randn(3, 4)
LOOKING = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "any forward hook": lambda m: register_module_forward_hook(lambda *_: None),
    "any forward pre-hook": lambda m: register_module_forward_pre_hook(lambda *_: None),
    "any backward hook": lambda m: register_module_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("look", LOOKING)
@torch.no_grad()
def test_hooks_see_the_plain_operations(look):
    module = layer()
    assert module.is_fast(X)
    handle = LOOKING[look](module)
    assert not module.is_fast(X)
    handle.remove()
    assert module.is_fast(X)


def with_parameter(change):
    def apply(module):
        module.weight = nn.Parameter(change(module.weight.detach()), requires_grad=False)

    return apply


def as_attribute(module):
    weight = module.weight.detach()
    del module.weight
    module.weight = weight  # as in a replica


CHANGES = {
    "type": with_parameter(lambda weight: weight.double()),
    "gaps": with_parameter(lambda weight: weight.repeat(1, 1, 2)[..., ::2]),
    "class": with_parameter(lambda weight: weight.as_subclass(Quantised)),
    "meta": with_parameter(lambda weight: weight.to("meta")),
    "replica": as_attribute,
    "forward": lambda module: setattr(module, "forward", lambda x: x),
    "parametrization": lambda module: parametrize.register_parametrization(
        module, "weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_modules_compute_plainly(change):
    module = layer()
    CHANGES[change](module)
    assert not (isinstance(module, FastModule) and module.is_fast(X))


@torch.no_grad()
def test_compilers_and_tracers_see_the_plain_operations():
    module, x = layer(), tokens(3, 4).float()
    expected = module(x)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert "baddbmm" not in str(graphs[0].graph)
    traced = torch.jit.trace(module, x)
    torch.testing.assert_close(traced(x), expected)
    assert "baddbmm" not in str(traced.inlined_graph)
    assert "baddbmm" not in str(torch.export.export(module, (x,)).graph)
    torch.testing.assert_close(module(x.as_subclass(Quantised)).as_subclass(Tensor), expected)
