"""The field's mixers against references: numbers, gradients, multiply-adds and three hosts."""

import copy
import importlib
import pkgutil
import sys
import types
from itertools import cycle

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from backbones import create_backbone, create_mixer, list_mixers
from backbones.analysis.counting import count_macs
from backbones.fast.torch.gated_delta import FastGatedDelta
from backbones.mixers.recurrent import mlstm
from backbones.mixers.recurrent.gated_delta import delta_rule
from backbones.registry import find_host, find_mixer, why_unfit
from backbones.replace import share_state
from tests.families import build_short, rest_slow_pairs
from tests.references import field
from tests.tensors import build_mixer, images, tokens
from tools.bench.scans import SCANS, make_inputs

REFERENCES = {
    found.name: importlib.import_module(f"{field.__name__}.{found.name}")
    for found in pkgutil.iter_modules(field.__path__)
}
CASES = [
    (name, options)
    for name, reference in REFERENCES.items()
    for options in getattr(reference, "CASES", [{}])
]
# Packages of mixers that came with their own tests.
EARLIER = {"afbo", "iffn", "metamixer", "posmlp", "sbm"}
SIZES = [(9, 15), (8, 8)]  # the second is the size that tables are built for
# Maps as (B, C, H, W), as (B, H, W, C), and tokens with a class token.
HOSTS = ("poolformer_s12", "lvt_r1", "deit_t")
# Their papers claim a cost that is linear in the number of tokens.
LINEAR = [
    "xca", "channel_attention", "efficient_additive", "outlook", "neighborhood", "relu_linear",
    "mlla", "rala", "focused_linear", "polaformer", "agent", "hydra", "performer",
]  # fmt: skip
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def build(name, options):
    dim = getattr(REFERENCES[name], "DIM", 24)
    return build_mixer(name, dim, **{"grid": SIZES[1], **options}), dim


def test_every_mixer_of_a_room_has_a_reference():
    """A room is a package of mixers, one per file."""
    modules = {name: find_mixer(name).build.__module__.split(".") for name in list_mixers()}
    rooms = {name for name, parts in modules.items() if parts[2] not in EARLIER and len(parts) == 4}
    assert rooms <= set(REFERENCES) <= set(list_mixers())


@every_case
def test_outputs_and_gradients_equal_the_reference(name, options):
    mixer, dim = build(name, options)
    for height, width in SIZES:
        x = tokens(2, height, width, dim).requires_grad_()
        assert_equal(mixer, mixer(x), REFERENCES[name].reference(mixer, x), x)


@every_case
def test_joint_mixing_equals_the_reference(name, options):
    mixer, dim = build(name, options)
    joint = getattr(REFERENCES[name], "joint", None)
    assert (joint is not None) == (mixer.prefix_mixing == "joint")
    if joint is not None:
        x, prefix = tokens(2, 9, 15, dim).requires_grad_(), tokens(2, 3, dim, seed=2)
        found, expected = (
            torch.cat([y.flatten(1, 2), p], 1)
            for y, p in (mixer(x, prefix), joint(mixer, x, prefix))
        )
        assert_equal(mixer, found, expected, x)


def assert_equal(mixer, found, expected, x):
    """Compare outputs, and the gradients of the input and of all parameters."""
    direction = tokens(*found.shape, seed=3)
    leaves = {"input": x, **dict(mixer.named_parameters())}
    pairs = {"output": (found, expected)}
    gradients = (
        torch.autograd.grad(y, list(leaves.values()), direction, allow_unused=True)
        for y in (found, expected)
    )
    pairs |= {f"gradient of {n}": pair for n, *pair in zip(leaves, *gradients, strict=True)}
    for name, (one, other) in pairs.items():
        size = 1.0 if other is None else float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9 * max(1.0, size), msg=name)


@every_case
def test_multiply_adds_are_those_of_the_equations(name, options):
    mixer, dim = build(name, options)
    for height, width in SIZES:
        expected = REFERENCES[name].macs(mixer, dim, height, width)
        assert count_macs(mixer.float(), shape=(height, width, dim)) == expected


def test_counts_differ_from_torchs_by_what_it_leaves_out():
    """Torch's counter knows neither triangular systems nor fused attention on a CPU."""
    x = torch.randn(1, 14, 14, 64)
    counted = []
    for name in ("bi_level", "gated_delta"):
        mixer = create_mixer(name, 64).eval()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs:
            mixer(x)
        own = count_macs(mixer, shape=(14, 14, 64))
        counted.append(own - torchs.get_total_flops() // 2)
    directions, chunks, tokens_of_chunk = 2, 7, 32
    substitutions = tokens_of_chunk * (tokens_of_chunk - 1) // 2 * tokens_of_chunk
    assert counted == [0, directions * chunks * substitutions]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_mixers_cost_the_same_per_token(name):
    with torch.device("meta"):
        mixer = create_mixer(name, 64, grid=(28, 28))
    few, many = (count_macs(mixer, shape=(side, side, 64)) for side in (28, 56))
    assert many == 4 * few


PAIRS = [
    (name, host)
    for name in REFERENCES
    for host in HOSTS
    if not why_unfit(find_host(host), find_mixer(name))
]
# One host per mixer, in rotation; every token mixer is in DeiT in test_patch_reach.py.
TURNS = {kind: cycle(HOSTS if kind == "channel" else HOSTS[:2]) for kind in ("channel", "token")}
QUICK = [(name, next(TURNS[find_mixer(name).kind])) for name in REFERENCES]


@pytest.mark.parametrize(("name", "host"), rest_slow_pairs(PAIRS, QUICK[::3]))
def test_every_layout_of_a_host_takes_the_mixer(name, host):
    """Gradients of the embedding reach all of the mixers' parameters that training changes."""
    is_channel = find_mixer(name).kind == "channel"
    host, options = (f"{host}_{name}", {}) if is_channel else (host, {"token_mixer": name})
    backbone = build_short(host, img_size=(64, 96), **options).train()
    embedded = backbone.embed(images(64, 96, batch=2).float())
    assert embedded.isfinite().all()
    embedded.square().sum().backward()
    assert backbone.mixers()
    for place, mixer in backbone.mixers().items():
        for key, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f"{place}{key}"


def test_mixers_that_alternate_follow_their_block():
    """The default options take the authors' values by stage and block."""
    with torch.device("meta"):
        swin = create_backbone("swin_t", token_mixer="shifted_window")
        pvt = create_backbone("pvt_v2_b1", token_mixer="lsa_gsa")
        hire = create_backbone("swin_t", token_mixer="hire")
        gnconv = create_backbone("swin_t", token_mixer="gnconv")
    assert [mixer.shift for mixer in swin.mixers().values()] == [0, 3] * 6
    kinds = [hasattr(mixer.attn, "window") for mixer in pvt.mixers().values()]
    assert kinds == [True, False] * 4
    shifts = [mixer.layers.shift for mixer in hire.mixers().values()]
    assert shifts == [0, 2, 0, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    regions = [mixer.layers.region for mixer in hire.mixers().values()]
    assert regions == [4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2]
    assert [create_mixer("hire", 8, block=block).layers.shift for block in range(4)] == [0, 2, 0, 2]
    with torch.device("meta"):
        differential = create_backbone("deit_t", token_mixer="differential")
        routed = create_backbone("pvt_v2_b1", token_mixer="bi_level")
        agents = create_backbone("pvt_v2_b1", token_mixer="agent")
        decaying = create_backbone("pvt_v2_b1", token_mixer="retention")
    assert [mixer.side**2 for mixer in agents.mixers().values()] == [9, 9, 16, 16] + [49] * 4
    assert [mixer.decomposed for mixer in decaying.mixers().values()] == [True] * 6 + [False] * 2
    depths = [mixer.lambda_init for mixer in differential.mixers().values()]
    assert depths == sorted(depths)
    assert [mixer.topk for mixer in routed.mixers().values()] == [1, 1, 4, 4, 16, 16, 49, 49]
    orders = [len(mixer.widths) for mixer in gnconv.mixers().values()]
    assert orders == [2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 5]


def test_experts_are_balanced_by_a_loss_of_importance_and_load():
    """Their mean and its gradients; copies and evaluation leave the loss out."""
    mixer = create_mixer("sparse_moe", 8, experts=4, noise=1.0, balance=0.5).double().train()
    x, weight = tokens(2, 5, 6, 8), mixer.router.weight
    torch.manual_seed(1)
    mixer(x)
    assert copy.deepcopy(mixer).take_penalty() is None
    loss = mixer.take_penalty()
    assert mixer.take_penalty() is None
    torch.manual_seed(1)
    logits = x.flatten(0, 2) @ weight.T
    noise = torch.randn(2, 30, 4, dtype=torch.float64).flatten(0, 1) / 4
    second = (logits + noise).sort(-1, descending=True).values[:, 1:2]
    load = 1 - torch.distributions.Normal(0.0, 1.0).cdf((second - logits) * 4)
    sums = [part.sum(0) for part in (logits.softmax(-1), load)]
    expected = 0.5 / 2 * sum((v.std(correction=0) / v.mean()) ** 2 for v in sums)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, weight)[0] for one in (loss, expected)), rtol=1e-6, atol=1e-9
    )
    mixer.eval()(x)
    assert mixer.take_penalty() is None


@pytest.mark.parametrize("name", ["bi_wkv", "rwkv_channel_mix"])
def test_layers_of_vision_rwkv_start_at_torchs_deviations(name):
    """The authors' code leaves its linear layers as torch draws them: uniform, 1 / sqrt(3 C)."""
    torch.manual_seed(0)
    for part in create_mixer(name, 64).modules():
        if isinstance(part, torch.nn.Linear):
            weight, bound = part.weight.detach(), part.in_features**-0.5
            assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
            assert float(weight.abs().max()) <= bound


def test_memories_of_many_chunks_are_summed_in_groups_of_groups(monkeypatch):
    """300 tokens in chunks of 4 are groups of 4, of 16 and of 64 chunks; the loop has none."""
    inputs = [x.double().requires_grad_() for x in make_inputs("mlstm", 300, 8)]
    monkeypatch.setattr(mlstm, "CHUNK", 4)
    outputs = [form(*inputs) for form in (mlstm.mlstm, SCANS["mlstm"][1])]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), inputs) for y in outputs))


def test_kernels_of_fla_get_what_they_document(monkeypatch):
    """On a CPU, with the plain form in the place of the kernel; no kernel runs here."""
    calls = []

    def kernel(q, k, v, g, beta, scale):
        calls.append([part.shape for part in (q, k, v, g, beta)])
        assert {part.dtype for part in (q, k, v)} == {torch.bfloat16}
        parts = (part.transpose(1, 2).float() for part in (q, k, v))
        read = delta_rule(*parts, g.transpose(1, 2), beta.transpose(1, 2))
        return (scale * read).transpose(1, 2).to(q.dtype), None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    mixer = create_mixer("gated_delta", 24, num_heads=2)
    x = tokens(2, 5, 6, 24).float()
    expected, form = mixer(x), share_state(mixer, FastGatedDelta)
    assert not form.serves(x)  # not on a GPU
    with torch.autocast("cpu", torch.bfloat16):
        found = form.compute(x).float()
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert calls == [[(4, 30, 2, 9)] * 2 + [(4, 30, 2, 18)] + [(4, 30, 2)] * 2]
