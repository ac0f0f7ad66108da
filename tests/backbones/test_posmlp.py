"""PosMLP's gating units against plain references: forward, gradient, windows, cache."""

import pytest
import torch

from backbones import Slot, create_backbone, create_mixer
from backbones.fast import fast
from backbones.fast.cpu.posmlp import FastGatedMLP
from backbones.layers.windows import cut
from backbones.mixers.posmlp import posgu
from backbones.mixers.posmlp.gated_mlp import GatedMLP
from backbones.mixers.posmlp.relations import LookupRelation, QuadraticRelation, TokenFC
from backbones.options import keywords
from tests.families import rest_slow_pairs
from tests.forms import both_forms
from tests.references import posmlp as reference
from tests.tensors import randomise, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
UNITS = ("sgu", "lrpe_m", "lrpe", "glrpe", "ggqpe")
# Maps (H, W) for windows of 4: one window, several, odd, narrower than a window, one row or token;
# (10, 6) pads by two windows' worth less the shift, (6, 6) leaves a window of padding and head.
MAPS = [(4, 4), (8, 4), (9, 5), (3, 9), (1, 6), (10, 6), (1, 1)]


RELATIONS = {
    "free": lambda: TokenFC(4),
    "free_without_bias": lambda: TokenFC(4, bias=False, init="posmlp"),
    "lookup": lambda: LookupRelation(4),
    "lookup_and_free": lambda: LookupRelation(4, has_weight=True),
    "lookup_groups": lambda: LookupRelation(4, 3),
    "gaussian": lambda: QuadraticRelation(4, 3),
    "gaussian_without_bias": lambda: QuadraticRelation(4, 2, bias=False),
    "gaussian_frozen": lambda: QuadraticRelation(4, 2, freeze_delta=True),
    "gamma": lambda: QuadraticRelation(4, 2, sigma="gamma"),
    "alpha": lambda: QuadraticRelation(4, 3, sigma="alpha"),
    "alpha_as_released": lambda: QuadraticRelation(4, 3, sigma="alpha_as_released"),
}


SHIFTED = [(name, shifted) for name in RELATIONS for shifted in (False, True)]


@both_forms
@pytest.mark.parametrize(("name", "shifted"), rest_slow_pairs(SHIFTED, SHIFTED[::3]))
def test_relation_equals_the_loops(name, shifted, form):
    relation = form(randomise(RELATIONS[name]()))
    for size in MAPS if name == "lookup_and_free" else [(9, 5), (3, 7)]:
        u = tokens(2, *size, 6).requires_grad_()
        found = relation(u, shifted=shifted)
        expected = torch.stack(
            [reference.relation(relation, image, shifted=shifted) for image in u]
        )
        torch.testing.assert_close(found, expected, **EXACT)
        with torch.no_grad():
            torch.testing.assert_close(relation(u, shifted=shifted), expected, **EXACT)
        inputs = [u, *relation.parameters()]
        direction = tokens(*found.shape, seed=2)
        ours, theirs = (
            torch.autograd.grad(y, inputs, direction, allow_unused=True) for y in (found, expected)
        )
        for mine, other in zip(ours, theirs, strict=True):
            # With all keys of a row alike (one token), a softmax has no gradient.
            other = torch.zeros_like(mine) if other is None else other
            torch.testing.assert_close(mine, other, **EXACT)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
def test_other_windows_equal_the_loops(window, shifted):
    relation = randomise(QuadraticRelation(window, 2))
    u = tokens(1, 8, 6, 4)
    expected = reference.relation(relation, u[0], shifted=shifted)[None]
    torch.testing.assert_close(relation(u, shifted=shifted), expected, **EXACT)


@pytest.mark.parametrize("window", [1, 2, 5, 14])
@pytest.mark.parametrize("shifted", [False, True])
def test_an_axis_is_cut_into_all_its_tokens(window, shifted):
    for length in range(1, 40):
        runs, shift = cut(length, window, shifted)
        assert sum(count * (pattern.tail + pattern.head) for count, pattern in runs) == length
        assert all(pattern.tail + pattern.head <= pattern.size for _, pattern in runs)
        assert sum(count for count, _ in runs) == -(-length // window)
        assert len(runs) <= 3
        assert shift == (window // 2 if shifted and length > window else 0)


@torch.no_grad()
def test_starts_as_the_paper_says():
    torch.manual_seed(0)
    free, lookup = TokenFC(14), LookupRelation(14, 8, has_weight=True)
    assert free.weight.abs().max() < 1e-5
    assert (free.bias == 1).all()
    released = TokenFC(14, init="posmlp")
    assert released.weight.std() == pytest.approx(0.02, rel=0.05)
    assert not released.bias.any()
    assert not lookup.table.any()
    assert lookup.weight.abs().max() < 1e-5
    gaussian = QuadraticRelation(14, 64)
    assert gaussian.centers.std() == pytest.approx(0.01, rel=0.2)
    assert (gaussian.spreads - torch.eye(2)).std() == pytest.approx(0.01, rel=0.2)
    assert QuadraticRelation(14, 64, sigma="alpha").spreads.mean() == pytest.approx(1, abs=0.01)
    x = tokens(1, 4, 4, 8).float()
    assert not create_mixer("lrpe", 8)(x).any()  # a block of it is the identity


BRANCHES = [
    *((unit, {}) for unit in UNITS),
    *(("ggqpe", {"structure": s}) for s in ("add", "concat", "nonsplit")),
    ("glrpe", {"structure": "nonsplit", "groups": 3}),
    ("ggqpe", {"norm": True, "bias": False}),
    ("sgu", {"norm": False, "structure": "concat"}),
    ("lrpe_m", {"norm": True, "groups": 4, "hidden_ratio": 2}),
]


@pytest.mark.parametrize(("unit", "options"), BRANCHES, ids=str)
def test_branch_equals_its_equations(unit, options):
    slot_of_block_1 = {"slot": Slot(12, 4.0, (5, 7), stage=0, block=1, dense=False)}
    mixer = build_unit(
        unit, 12, window=3, shift=True, **slot_of_block_1, **{"groups": 2, **options}
    )
    mixer = randomise(mixer)
    x = tokens(2, 5, 7, 12).requires_grad_()
    structure = options.get("structure", "gate")

    def mixed(u):
        return reference.relation(mixer.gate.relation, u, shifted=True)

    found, expected = mixer(x), reference.branch(x, mixer, mixed, structure)
    torch.testing.assert_close(found, expected, **EXACT)
    direction = tokens(*found.shape, seed=2)
    inputs = [x, *mixer.parameters()]
    torch.testing.assert_close(
        *(torch.autograd.grad(y, inputs, direction) for y in (found, expected)), **EXACT
    )


@pytest.mark.parametrize("unit", ["ggqpe", "glrpe"])
@pytest.mark.parametrize("shift", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize("order", ["runs", "dealt"])
def test_the_fast_form_equals_the_plain_one(unit, shift, order, monkeypatch):
    monkeypatch.setattr(FastGatedMLP, "_joins_groups", lambda mixer, x: order == "runs")
    slot = Slot(12, 4.0, (9, 7), stage=0, block=1, dense=False)
    mixer = randomise(build_unit(unit, 12, window=4, groups=3, shift=shift, slot=slot))
    x = tokens(2, 9, 7, 12).requires_grad_()
    inputs = [x, *mixer.parameters()]
    direction = tokens(2, 9, 7, 12, seed=2)
    expected, found = mixer(x), fast(mixer).compute(x)
    exact = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found, expected, **exact)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        **exact,
    )


def build_unit(unit, dim, **options):
    function = getattr(posgu, unit)
    return function(dim, **{k: v for k, v in options.items() if k in keywords(function)})


def test_shifts_every_second_block_of_dense_hosts():
    def shifted(name, **options):
        backbone = create_backbone(name, **options)
        return [m.gate.shifted for m in backbone.modules() if isinstance(m, GatedMLP)]

    with torch.device("meta"):
        assert shifted("posmlp_t") == [False] * 24
        assert shifted("posmlp_t", dense=True) == [False, True] * 12
        assert shifted("poolformer_s12", token_mixer="lrpe", dense=True) == [False, True] * 6
        always = {"name": "sgu", "shift": True}
        assert shifted("swin_t", token_mixer=always) == [False, True] * 6
        assert shifted("swin_t", token_mixer={"name": "sgu", "shift": False}, dense=True) == [
            False
        ] * len(shifted("swin_t", token_mixer="sgu"))


CACHED = ("lookup_and_free", "lookup_groups", "gaussian", "gaussian_frozen", "alpha")


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_evaluation_follows_changed_weights(name):
    relation, u = fast(randomise(RELATIONS[name]())), tokens(1, 9, 5, 6)
    for parameter in relation.parameters():
        before = relation(u, shifted=True)
        assert torch.equal(relation(u, shifted=True), before)
        parameter.data[..., -1:] += 0.4
        after = relation(u, shifted=True)
        assert not torch.allclose(before, after)
        relation.cache = False
        torch.testing.assert_close(relation(u, shifted=True), after, rtol=0, atol=0)
        relation.cache = True


def test_matrix_is_exact_under_autocast():
    """Half precision has 8 bits of mantissa; squared offsets of 14 tokens go up to 338."""
    relation = QuadraticRelation(14, 1, bias=False)
    relation.spreads.data[0] = torch.tensor([[0.3, 0.1], [-0.05, 0.4]])
    relation.centers.data[0] = torch.tensor([1.3, -2.1])
    pattern = cut(14, 14, False)[0][0][1]
    expected = relation.matrix(pattern, pattern)[0].bfloat16()
    u = torch.eye(196).reshape(1, 14, 14, 196)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            found = relation(u).reshape(196, 196)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
