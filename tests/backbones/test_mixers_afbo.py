"""AFBO and its ablations as whole mixers, against their equations written with loops."""

import inspect

import pytest
import torch

from backbones import create_mixer, list_mixers
from backbones.analysis.counting import count_parameters
from backbones.mixers.afbo import (
    SCFBO,
    BlockDiagonalMapping,
    DenseMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
)
from tests.families import meta_classifier, rest_slow_pairs
from tests.references import afbo as reference
from tests.tensors import build_mixer

# Mappings of the two branches and the order of every registered name.
VARIANTS = {
    "afbo": {"cm_a": "occm", "cm_b": "gccm"}, "afbo_cs": {"cm_a": "occm", "cm_b": "gccm"},
    "afbo_c": {"cm_a": "occm", "cm_b": "gccm", "sm": "none"},
    "afbo_s": {"cm_a": "dense", "cm_b": "shared"},
    "afbo_sc": {"cm_a": "occm", "cm_b": "gccm", "order": "sc"},
    "scfbo_gc": {"cm_a": "gccm", "cm_b": "gccm"}, "scfbo_oc": {"cm_a": "occm", "cm_b": "occm"},
    "full": {"cm_a": "dense", "cm_b": "dense"},
}  # fmt: skip
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


def test_all_names_are_compared_and_cyclic_rounds_counted():
    family = {
        name
        for name in list_mixers("channel")
        if inspect.unwrap(create_mixer(name, 8).__class__) is SCFBO
    }
    assert family == set(VARIANTS)
    model = meta_classifier("deit_t_afbo", mixer={"g1": 4, "rounds": 4, "pairing": "cyclic"})
    assert count_parameters(model) == 5_579_176


@pytest.mark.parametrize("name", VARIANTS)
def test_bias_false_removes_exactly_the_biases(name):
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


def test_initial_scales():
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 192)
    x = torch.randn(2, 14, 14, 192, requires_grad=True)
    y = mixer(x)
    y.backward(torch.randn_like(y))
    assert 0.2 < y.std() < 0.5
    assert 0.3 < x.grad.std() < 0.7
    model = create_mixer("afbo_sc", 6, sm="conv").sm_a
    centre = model.weight.detach()[:, :, 1, 1] - torch.eye(6)
    assert model.weight.std() < 0.2
    assert centre.abs().max() < 0.1
    kernels = create_mixer("afbo", 6).sm_b.weight.detach()
    assert (kernels[:, 0, 1, 1] - 1).abs().max() < 0.1
    assert (kernels[:, 0, 0].abs().max() < 0.1).all()
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 96, init="timm")
    for weight in (*mixer.cm_a.weights, mixer.cm_b.weight, mixer.proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixer.sm_a.weight.std().item() == pytest.approx(1 / 3 / 3**0.5, rel=0.1)
    for mapping in (DenseMapping(64, 256), gccm(64, 256, 2), occm(64, 256, 3)):
        columns = (mapping.dense_weight() != 0).sum(1, keepdim=True)
        scaled = mapping.dense_weight() * columns**0.5
        assert scaled[scaled != 0].std().item() == pytest.approx(1, abs=0.05)
        assert not mapping.bias.any()


def fill_by_position(weight, group):
    """Entry = 100 (group + 1) + 10 (row + 1) + (column + 1)."""
    rows, columns = weight.shape
    row = torch.arange(1, rows + 1)[:, None]
    weight.data.copy_(100.0 * (group + 1) + 10 * row + torch.arange(1, columns + 1))


def gccm(dim, hidden, groups, rounds=2, pairing="anti"):
    return GroupedCrossMapping(dim, hidden, groups, rounds, pairing).double()


def occm(dim, hidden, groups, window=None):
    return OverlappedCycleMapping(dim, hidden, groups, window).double()


def integers(mapping):
    """The mapping of (1, ..., 6) with weights filled by position and no bias."""
    for group, weight in enumerate(getattr(mapping, "weights", None) or mapping.weight):
        fill_by_position(weight, group)
    torch.nn.init.zeros_(mapping.bias)
    return mapping(torch.arange(1.0, 7.0, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (gccm(6, 12, 2), "674 734 794 3182 3332 3482 1682 1832 1982 1274 1334 1394"),
        # Odd G: the middle weight meets the same group twice, so blocks 1 and 4 coincide.
        (gccm(6, 12, 3), "335 365 1481 1551 3427 3537 1227 1337 1481 1551 935 965"),
        (occm(6, 12, 3, 2), "1130 1230 1330 1430 3830 4010 4190 4370 4368 4508 4648 4788"),
        (occm(6, 10, 4, 3), "1705 1855 2005 3830 4010 4190 4368 4508 6606 6766"),
    ],
    ids=["gccm_2", "gccm_3", "occm_3_2", "occm_4_3_uneven"],
)
def test_worked_examples(mapping, expected):
    assert integers(mapping) == [float(number) for number in expected.split()]


def assert_equals_matrix(mapping, matrix):
    torch.testing.assert_close(mapping.dense_weight(), matrix, rtol=0, atol=0)
    torch.nn.init.normal_(mapping.bias)
    x = torch.randn(2, 3, 5, mapping.dim, dtype=torch.float64)
    expected = x @ matrix.T + mapping.bias
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(mapping(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("groups", "rounds", "pairing"),
    [
        *[(groups, 2, "anti") for groups in (1, 2, 3, 4, 5, 6)],
        *[(groups, 1, "anti") for groups in (2, 5)],
        *[(groups, rounds, "cyclic") for groups in (2, 3, 4) for rounds in range(1, groups + 1)],
    ],
)
def test_gccm_equals_its_matrix(groups, rounds, pairing):
    mapping = gccm(2 * groups, 3 * groups * rounds, groups, rounds, pairing)
    assert_equals_matrix(mapping, reference.gccm_matrix(mapping.weight.detach(), rounds, pairing))


@pytest.mark.parametrize("widths", [(12, 24), (13, 23), (7, 20)], ids=str)
@pytest.mark.parametrize(
    ("groups", "window"), [(g, k) for g in (1, 2, 3, 4, 5, 7) for k in range(1, g + 1)]
)
def test_occm_equals_its_matrix(widths, groups, window):
    mapping = occm(*widths, groups, window)
    weights = [weight.detach() for weight in mapping.weights]
    assert_equals_matrix(mapping, reference.occm_matrix(weights, *widths, window))


@pytest.mark.parametrize(("groups", "window"), [(1, 1), (2, 1), (3, 2), (4, 3), (6, 5)])
def test_occm_reads_all_groups_but_one_by_default(groups, window):
    assert torch.equal(
        occm(12, 24, groups).dense_weight() != 0, occm(12, 24, groups, window).dense_weight() != 0
    )


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_block_diagonal_equals_its_matrix(groups):
    mapping = BlockDiagonalMapping(2 * groups, 3 * groups, groups).double()
    assert_equals_matrix(mapping, torch.block_diag(*mapping.weight.detach()))


def test_dense_equals_its_matrix():
    mapping = DenseMapping(5, 7).double()
    assert_equals_matrix(mapping, mapping.weight.detach())
