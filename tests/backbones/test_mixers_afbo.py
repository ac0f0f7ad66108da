"""AFBO and its ablations as whole mixers, against their equations written with loops."""

import copy
import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backbones import create_mixer, list_mixers, mixer_options
from backbones.mixers.afbo import SCFBO
from backbones.mixers.afbo.spatial_models import create_spatial_model
from tests.families import rest_slow, rest_slow_pairs
from tests.references import afbo as reference
from tests.tensors import build_mixer

# Mappings of the two branches and the order of every registered name.
VARIANTS = {
    "afbo": {"cm_a": "occm", "cm_b": "gccm"},
    "afbo_cs": {"cm_a": "occm", "cm_b": "gccm"},
    "afbo_c": {"cm_a": "occm", "cm_b": "gccm", "sm": "none"},
    "afbo_s": {"cm_a": "dense", "cm_b": "shared"},
    "afbo_sc": {"cm_a": "occm", "cm_b": "gccm", "order": "sc"},
    "scfbo_gc": {"cm_a": "gccm", "cm_b": "gccm"},
    "scfbo_oc": {"cm_a": "occm", "cm_b": "occm"},
    "full": {"cm_a": "dense", "cm_b": "dense"},
}
CASES = [
    *[(name, {}) for name in VARIANTS],
    ("afbo", {"g2": 3, "hidden_ratio": 2}),
    ("afbo", {"g1": 4, "g2": 5, "window": 2, "kernel_size": 5}),
    ("afbo", {"g1": 4, "rounds": 4, "pairing": "cyclic", "g2": 7, "kernel_size": 1}),
    ("afbo", {"g1": 2, "g2": 2, "kernel_size": 7}),
    ("afbo", {"cm_a": "gccm", "cm_b": "occm"}),
    ("afbo", {"cm_a": "block", "cm_b": "dense", "g1": 4}),
    ("afbo", {"order": "sc", "sm": "conv"}),
    *[(name, {"bias": False}) for name in ("afbo", "afbo_s", "full")],
    ("afbo_sc", {"sm": "conv", "bias": False}),
    ("scfbo_gc", {"g1": 4, "rounds": 1, "bias": False}),
    ("afbo_sc", {"sm": "conv", "kernel_size": 5, "g2": 3}),
    ("scfbo_gc", {"g1": 4, "rounds": 1, "act_on": "b"}),
    ("scfbo_oc", {"g2": 5, "window": 5, "act": "gelu", "act_on": "post"}),
    ("afbo_c", {"act": "gelu", "act_on": "ab"}),
    *[("afbo_s", {"sm": sm, "act_on": on}) for sm, on in (("none", "ab"), ("max", "b"))],
    *[("afbo_s", {"order": "sc", "act": act}) for act in ("gelu", "relu")],
    *[("full", {"sm": sm, "order": order}) for sm in ("sa", "none") for order in ("cs", "sc")],
    *[("afbo", {"sm": sm, "act_on": "ab"}) for sm in ("max", "avg", "sa", "none")],
    *[("afbo", {"sm": sm, "kernel_size": 5, "order": "sc"}) for sm in ("max", "avg")],
    *[("afbo", {"act": a, "act_on": on}) for a in ("silu", "relu") for on in ("b", "ab", "post")],
]


def by_loops(name, options, mixer, x, prefix):
    options = VARIANTS[name] | options
    arguments = {k: v for k, v in options.items() if k not in ("g1", "g2", "hidden_ratio", "bias")}
    return reference.scfbo(x, prefix, dict(mixer.named_parameters()), **arguments)


@pytest.mark.parametrize(
    ("size", "num_prefix"),
    rest_slow_pairs(
        [((3, 5), 1), ((1, 4), 2), ((6, 2), 0), ((1, 1), 1)], [((3, 5), 1), ((6, 2), 0)]
    ),
    ids=str,
)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_mixer_equals_the_loops(name, options, size, num_prefix):
    mixer = build_mixer(name, **options)
    x = torch.randn(2, *size, 8, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(2, num_prefix, 8, dtype=torch.float64, requires_grad=True)
    expected = by_loops(name, options, mixer, x, prefix)
    found = mixer(x, prefix)
    with torch.no_grad():
        quick = mixer(x, prefix)
        alone = mixer(x)
    pairs = zip((*found, *quick, alone), (*expected, *expected, expected[0]), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)

    def gradients(mixed, mixed_prefix):
        total = mixed.sin().sum() + mixed_prefix.cos().sum()
        return torch.autograd.grad(total, [x, prefix, *mixer.parameters()])

    for ours, theirs in zip(gradients(*found), gradients(*expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_all_names_are_compared():
    family = {
        name
        for name in list_mixers("channel")
        if inspect.unwrap(create_mixer(name, 8).__class__) is SCFBO
    }
    assert family == set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_biases_there_is_none_and_nothing_else_is_gone(name):
    usual, without = create_mixer(name, 12), create_mixer(name, 12, bias=False)
    shapes = {key: value.shape for key, value in usual.state_dict().items()}
    kept = {key: shape for key, shape in shapes.items() if not key.endswith("bias")}
    assert {key: value.shape for key, value in without.state_dict().items()} == kept
    # h for each mapping and each convolution, C for W3.
    parts = {"afbo_c": 2, "afbo_s": 3}.get(name, 4) * 48
    parts = 2 * 48 + 2 * 12 if name == "afbo_sc" else parts
    gone = sum(p.numel() for p in usual.parameters()) - sum(p.numel() for p in without.parameters())
    assert gone == parts + 12
    with torch.no_grad():  # a zero map stays zero
        assert not without(torch.zeros(1, 2, 3, 12)).any()


@pytest.mark.parametrize("name", ["afbo", "afbo_s", "afbo_sc", "scfbo_gc"])
def test_gradcheck(name):
    mixer = build_mixer(name, hidden_ratio=1)
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(1, 1, 8, dtype=torch.float64, requires_grad=True)
    names, values = zip(*mixer.named_parameters(), strict=True)

    def run(x, prefix, *values):
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (x, prefix))

    assert torch.autograd.gradcheck(run, (x, prefix, *values), fast_mode=True)


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({"kernel_size": 1}, 0),
        ({}, 1),
        ({"kernel_size": 5}, 2),
        ({"order": "sc"}, 1),
        ({"sm": "avg", "kernel_size": 5}, 2),
        ({"sm": "sa"}, 3),
        ({"sm": "none", "kernel_size": 5}, 0),
    ],
    ids=str,
)
def test_receptive_field_is_the_kernel(options, reach):
    mixer = build_mixer("afbo", **options)
    x = torch.randn(1, 9, 11, 8, dtype=torch.float64)
    changed = x.clone()
    changed[0, 4, 5] += 1
    rows, columns = (mixer(x) - mixer(changed))[0].abs().sum(-1).nonzero(as_tuple=True)
    assert (rows.min(), rows.max()) == (4 - reach, 4 + reach)
    assert (columns.min(), columns.max()) == (5 - reach, 5 + reach)


def test_average_pooling_does_not_count_the_padding():
    ones = torch.ones(1, 3, 4, 2)
    torch.testing.assert_close(create_spatial_model("avg", 2, 3)(ones), ones)
    torch.testing.assert_close(create_spatial_model("max", 2, 5)(-ones), -ones)


# Numbers


@pytest.mark.parametrize(("g1", "g2"), [(2, 4), (2, 3), (4, 6), (1, 1)])
def test_parameters_follow_the_closed_form(g1, g2):
    dim, hidden, kernel = 24, 96, 3
    mixer = create_mixer("afbo", dim, g1=g1, g2=g2)
    share = 1 / (2 * g1) + max(1, g2 - 1) / g2 + 1
    expected = dim * hidden * share + 2 * hidden * kernel**2 + 4 * hidden + dim
    assert sum(p.numel() for p in mixer.parameters()) == round(expected)


@pytest.mark.parametrize(
    ("name", "options", "params"),
    [
        # DeiT-T with each mixer, from the closed forms.
        ("afbo", {}, 5910952),
        ("afbo", {"g2": 6}, 6058408),
        ("afbo", {"g2": 3}, 5763496),
        ("afbo", {"g2": 2}, 5468584),
        ("afbo", {"g1": 4}, 5689768),
        ("afbo", {"g1": 4, "rounds": 4, "pairing": "cyclic"}, 5579176),
        ("afbo", {"kernel_size": 5}, 6205864),
        ("afbo", {"kernel_size": 7}, 6648232),
        ("afbo", {"sm": "max"}, 5726632),
        ("afbo", {"sm": "avg"}, 5726632),
        ("afbo", {"sm": "sa"}, 5728984),
        ("afbo", {"cm_a": "block", "cm_b": "block", "sm": "none"}, 5726632),
        ("afbo", {"cm_a": "block", "cm_b": "block", "sm": "none", "g1": 4}, 4841896),
        ("afbo_c", {}, 5726632),
        ("afbo_s", {}, 5901736),
        ("afbo_sc", {}, 5772712),
        ("afbo_sc", {"sm": "conv"}, 13693864),
        ("scfbo_gc", {}, 5026216),
        ("scfbo_oc", {}, 6795688),
        ("full", {}, 7680424),
    ],
    ids=str,
)
def test_parameters_of_deit_t_are_exact(name, options, params):
    host, ffn = 5717416, 2 * 192 * 768 + 768 + 192
    mixer = create_mixer(name, 192, **options)
    assert host + 12 * (sum(p.numel() for p in mixer.parameters()) - ffn) == params


# Start


def test_starts_at_a_scale_that_lets_gradients_through():
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 192)
    x = torch.randn(2, 14, 14, 192, requires_grad=True)
    y = mixer(x)
    y.backward(torch.randn_like(y))
    assert 0.2 < y.std() < 0.5
    assert 0.3 < x.grad.std() < 0.7


def test_starts_as_the_plain_product_but_for_noise():
    model = create_mixer("afbo_sc", 6, sm="conv").sm_a
    centre = model.weight.detach()[:, :, 1, 1] - torch.eye(6)
    assert model.weight.std() < 0.2
    assert centre.abs().max() < 0.1
    kernels = create_mixer("afbo", 6).sm_b.weight.detach()
    assert (kernels[:, 0, 1, 1] - 1).abs().max() < 0.1
    assert (kernels[:, 0, 0].abs().max() < 0.1).all()


def test_timm_start_equals_that_of_vit():
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 96, init="timm")
    for weight in (*mixer.cm_a.weights, mixer.cm_b.weight, mixer.proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixer.sm_a.weight.std().item() == pytest.approx(1 / 3 / 3**0.5, rel=0.1)


# What users and tools do with a mixer


@pytest.mark.parametrize(
    "case", rest_slow([*CASES[:8], ("afbo", {"act_on": "post"})], CASES[:2]), ids=str
)
def test_compilers_and_tracers_give_the_same(case):
    name, options = case
    mixer = build_mixer(name, **options).eval()
    x, prefix = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 1, 8).double()
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        traced = torch.jit.trace(mixer, (x, prefix))
        for run in (compiled, traced):
            for ours, expected in zip(run(x + 1, prefix), mixer(x + 1, prefix), strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_autocast_and_inference_modes_agree(name):
    mixer = build_mixer(name).float().eval()
    x, prefix = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 8)
    expected = mixer(x, prefix)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            found = mixer(x, prefix)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.float() - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    mixer = build_mixer("afbo")
    twin = copy.deepcopy(mixer)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    mixer(x).sin().sum().backward()
    checkpoint(twin, x, use_reentrant=reentrant).sin().sum().backward()
    for ours, theirs in zip(mixer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


# Options


def test_every_name_has_the_options_that_mean_something_to_it():
    options = {name: set(mixer_options(name)) for name in VARIANTS}
    assert options["afbo"] == options["afbo_cs"]
    assert options["afbo_c"].isdisjoint({"sm", "kernel_size", "order"})
    assert options["scfbo_gc"].isdisjoint({"g2", "window"})
    assert options["scfbo_oc"].isdisjoint({"g1", "rounds", "pairing"})
    assert options["full"] == options["afbo_s"]
    assert all(
        {"hidden_ratio", "act", "act_on", "init", "drop"} <= given for given in options.values()
    )


@pytest.mark.parametrize("name", ["afbo", "afbo_cs", "afbo_c", "afbo_sc", "scfbo_oc"])
def test_group_numbers_follow_the_host(name):
    found = {host: mixer_options(name, host)["g2"] for host in ("deit_t", "deit_s", "swin_b")}
    assert found == {"deit_t": 4, "deit_s": 3, "swin_b": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"g1": 5}, r"g1 must be one of \[1, 2, 3, 4, 6, 8, 12, 24\] with 2 rounds, got 5"),
        ({"g1": 0}, r"g1 must be one of \[1, 2, 3, 4, 6, 8, 12, 24\] with 2 rounds, got 0"),
        ({"g1": 3, "hidden_ratio": 8 / 3}, r"hidden width 64: g1 must be one of \[1, 2, 4, 8\]"),
        ({"g1": 1, "hidden_ratio": 25 / 24}, r"hidden width 25: g1 must be one of \[\]"),
        ({"g2": 4, "window": 5}, r"window must be from 1 to g2 = 4, got 5"),
        ({"g2": 4, "window": 0}, r"window must be from 1 to g2 = 4, got 0"),
        ({"g2": 25}, r"g2 must be from 1 to 24, got 25"),
        ({"g2": 0}, r"g2 must be from 1 to 24, got 0"),
        ({"kernel_size": 4}, r"kernel_size must be odd \(1, 3, 5, 7, \.\.\.\), got 4"),
        ({"kernel_size": 2, "sm": "max"}, r"kernel_size must be odd .* got 2"),
        ({"kernel_size": 0}, r"kernel_size must be odd .* got 0"),
        ({"pairing": "mirror"}, r"mixer\.pairing=mirror is not one of anti, cyclic"),
        ({"rounds": 3}, r"1 or 2 with pairing anti and from 1 to g1 = 2 .*; got 3 with anti"),
        ({"rounds": 0}, r"rounds must be 1 or 2 with pairing anti .* got 0"),
        ({"rounds": 3, "pairing": "cyclic"}, r"to g1 = 2 with pairing cyclic; got 3 with cyclic"),
        ({"sm": "conv"}, r"sm=conv needs order=sc: .* 82,944 weights; .* one of dw, max, avg, sa"),
        ({"sm": "mean"}, r"mixer\.sm=mean is not one of dw, max, avg, sa, conv, none"),
        ({"order": "ss"}, r"mixer\.order=ss is not one of cs, sc"),
        ({"act": "tanh"}, r"mixer\.act=tanh is not one of silu, gelu, relu"),
        ({"act_on": "c"}, r"mixer\.act_on=c is not one of a, b, ab, post"),
        ({"init": "xavier"}, r"mixer\.init=xavier is not one of ours, timm"),
        ({"cm_a": "fast"}, r"mixer\.cm_a=fast is not one of dense, block, gccm, occm"),
    ],
    ids=str,
)
def test_refused_options_name_the_valid_ones(options, message):
    with pytest.raises(ValueError, match=message):
        create_mixer("afbo", 24, **options)
