"""AFBO and its ablations as whole mixers, against their equations written with loops."""

import inspect

import pytest
import torch

from backbones import create_mixer, list_mixers
from backbones.mixers.afbo import SCFBO, DenseMapping
from tests.errors import refuses
from tests.families import rest_slow_pairs
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

    torch.testing.assert_close(gradients(*found), gradients(*expected), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("option", ["sm", "order", "act", "act_on", "init"])
def test_the_class_itself_refuses_unknown_switches(option):
    refuses(f"{option}=x is not one of ", SCFBO, DenseMapping(4, 8), None, **{option: "x"})
