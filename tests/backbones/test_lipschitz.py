"""Lipschitz bounds: valid, ordered as theory says, certified by the theorem's own matrix."""

import copy
import functools
import itertools
import math

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from backbones import create_backbone, create_mixer
from backbones.analysis.lipschitz import GELU_TANH, lipschitz_bound, mixer_parts
from backbones.analysis.lipschitz_search import Part, Reduced, search
from backbones.mixers.iffn.activations import BASES, Arb, Base, RPReLU
from backbones.registry import look_up
from tests.errors import refuses
from tests.families import SMALLEST, rest_slow

CASES = rest_slow(  # C, N, seed
    list(itertools.product((2, 4), (2, 4), range(3))), quick=[(2, 4, 0), (4, 2, 1)]
)


def affn(dim, n_branches=2, seed=0, **options):
    """Return an AFFN in evaluation mode with unit gain, coefficients of both signs, moved norms."""
    torch.manual_seed(seed)
    mixer = create_mixer("affn", dim, n_branches=n_branches, **options).eval()
    with torch.no_grad():
        mixer.fc1.weight.normal_(std=dim**-0.5)
        mixer.fc2.weight.normal_(std=(4 * dim) ** -0.5)
        for branch in mixer.branches:
            for parameter in branch.parameters():
                parameter.normal_()
        for norm in (mixer.bn_mid, mixer.bn_out):
            norm.weight.normal_(mean=1, std=0.3)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return mixer


def with_nan(mixer):
    mixer.fc1.weight.data[0, 0] = math.nan
    return mixer


def steepest_seen(mixer, dim, samples=4000):
    """The largest gain of the Jacobian at random points near where the slopes change."""
    function = mixer.double()
    points = 2 * torch.randn(
        samples, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    jacobians = torch.func.vmap(
        torch.func.jacrev(lambda x: function(x[None, None, None])[0, 0, 0])
    )(points)
    return float(torch.linalg.matrix_norm(jacobians.detach(), 2).max())


def theorem_matrix(part, tau, rho):
    """The block matrix of Theorem 4.3 with T = diag(tau) / 2; negative semidefinite if it holds."""
    t = torch.diag(tau / 2)
    p, q = torch.diag(part.p), torch.diag(part.q)
    eye = torch.eye(part.w0.shape[1], dtype=torch.float64)
    corner = -2 * part.w0.T @ p @ t @ q @ part.w0 - rho * eye
    cross = part.w0.T @ (p + q) @ t
    return torch.cat(
        [
            torch.cat([corner, cross], dim=1),
            torch.cat([cross.T, -2 * t + part.w1.T @ part.w1], dim=1),
        ]
    )


def stacked(parts):
    return Part(
        torch.cat([p.w0 for p in parts]),
        torch.cat([p.w1 for p in parts], dim=1),
        torch.cat([p.p for p in parts]),
        torch.cat([p.q for p in parts]),
    )


GELU_BY_TANH = (functools.partial(nn.functional.gelu, approximate="tanh"), *GELU_TANH)


@pytest.mark.parametrize(
    ("case", "end", "rounding", "slack"),
    [*((case, 40, 1e-12, 1e-8) for case in BASES.values()), (GELU_BY_TANH, 4, 0, 1e-5)],
)
def test_slopes_of_the_activations(case, end, rounding, slack):
    x = torch.linspace(-end, end, 800_001, dtype=torch.float64, requires_grad=True)
    function, low, high = case
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    assert low - rounding <= slope.min() < low + slack
    assert high - slack < slope.max() <= high + rounding


@pytest.mark.parametrize(
    "activation",
    [*(Arb(6, name) for name in (*BASES, "prelu")), Base(6, "prelu"), RPReLU(6)],
    ids=lambda a: f"{type(a).__name__}-{getattr(a, 'base', a).name}",
)
def test_slopes_of_learned_activations(activation):
    torch.manual_seed(0)
    activation = activation.double()
    with torch.no_grad():
        for parameter in activation.parameters():
            parameter.normal_()
    x = torch.linspace(-60, 60, 400_001, dtype=torch.float64)[:, None].expand(-1, 6)
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(activation(x).sum(), x)
    low, high = activation.slopes()
    torch.testing.assert_close(slope.min(0).values, low.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(slope.max(0).values, high.detach(), rtol=0, atol=1e-4)
    assert (slope >= low - 1e-12).all()
    assert (slope <= high + 1e-12).all()


@pytest.mark.parametrize("case", CASES)
def test_order_of_all_bounds(case):
    dim, n_branches, _ = case
    mixer = affn(*case)
    joint = lipschitz_bound(mixer, "reduced")
    split = lipschitz_bound(mixer, "reduced", form="split")
    assert steepest_seen(mixer, dim) <= joint.bound
    assert joint.bound <= split.bound * (1 + 1e-6)
    assert joint.bound <= joint.product * (1 + 1e-9)
    assert joint.product == split.product
    assert (len(joint.rho), len(split.rho)) == (1, n_branches)
    assert joint.bound == math.sqrt(joint.rho[0])
    assert split.bound == pytest.approx(sum(math.sqrt(rho) for rho in split.rho), rel=1e-15)


@pytest.mark.parametrize("form", ["joint", "split"])
@pytest.mark.parametrize("case", CASES)
def test_tau_proves_rho_by_the_theorem(case, form):
    mixer = affn(*case)
    found = lipschitz_bound(mixer, "reduced", form=form)
    parts = mixer_parts(mixer)
    for part, rho, tau in zip(
        [stacked(parts)] if form == "joint" else parts, found.rho, found.tau, strict=True
    ):
        matrix = theorem_matrix(part, tau, rho)
        scale = float(torch.linalg.matrix_norm(matrix, 2))
        assert torch.linalg.eigvalsh(matrix)[-1] <= 1e-9 * scale
        # A rho that is smaller by a thousandth is not proved by it.
        smaller = theorem_matrix(part, tau, rho * 0.999)
        assert torch.linalg.eigvalsh(smaller)[-1] > 1e-7 * scale
    assert found.certified


def test_search_finds_known_optima_and_gradients():
    for p, q in ((-0.13, 1.13), (0.0, 1.0), (-2.0, 0.5), (0.3, 0.3)):
        part = Part(*(torch.tensor(v, dtype=torch.float64) for v in ([[3.0]], [[2.0]], [p], [q])))
        rho, _ = search(part, 600)
        assert math.sqrt(rho) == pytest.approx(6 * max(-p, q), rel=1e-4)
        assert math.sqrt(rho) >= 6 * max(-p, q) * (1 - 1e-12)
    # W0 and W1 diagonal: the constant is the steepest axis, and the bound finds it.
    torch.manual_seed(0)
    p, q = -torch.rand(5).double(), torch.rand(5).double()
    w0, w1 = torch.randn(5).double(), torch.randn(5).double()
    exact = float((w0.abs() * w1.abs() * torch.maximum(-p, q)).max())
    part = Part(torch.diag(w0), torch.diag(w1), p, q)
    rho, _ = search(part, 600)
    assert exact * (1 - 1e-12) <= math.sqrt(rho) < exact * 1.001
    assert part.product_bound() > exact * 1.1
    torch.manual_seed(1)
    w0, w1 = torch.randn(2, 3).double(), torch.randn(3, 2).double()
    part = Part(w0, w1, torch.tensor([-0.13, -1.0]).double(), torch.tensor([1.13, 0.2]).double())
    reduced = Reduced.eliminate(part)
    grid = torch.logspace(-1, 1.5, 120, dtype=torch.float64)
    least = min(reduced.rho(torch.stack([a, b])) for a in grid for b in grid)
    rho, _ = search(part, 600)
    assert rho / reduced.rho_unit <= least * (1 + 1e-5)
    assert rho / reduced.rho_unit >= least * 0.97
    reduced = Reduced.eliminate(stacked(mixer_parts(affn(3))))
    log_tau = torch.full((12,), 1.0, dtype=torch.float64) + 0.2 * torch.randn(12).double()
    _, gradient, rho = reduced.soft_rho(log_tau, 0.01)
    for j in range(12):
        step = torch.zeros(12, dtype=torch.float64)
        step[j] = 1e-5
        up, down = (reduced.soft_rho(log_tau + sign * step, 0.01)[0] for sign in (1, -1))
        assert (up - down) / 2e-5 == pytest.approx(float(gradient[j]), rel=1e-5, abs=1e-8)
    assert rho == pytest.approx(reduced.rho(log_tau.exp()), rel=1e-12)


def test_parts_are_the_mixer_which_is_left_alone():
    mixer = affn(5, n_branches=4, act="relu").double()
    x = torch.randn(2, 5, dtype=torch.float64)
    # The slope of each unit at x, then f'(x) = W1 diag(slope) W0 in evaluation mode.
    jacobian = torch.func.jacrev(lambda x: mixer(x[None, None, None])[0, 0, 0])(x[0])
    parts, total = mixer_parts(mixer), 0
    z = mixer.fc1(x[0])
    for part, branch in zip(parts, mixer.branches, strict=True):
        on = branch.alpha * z + branch.gamma > 0
        steep = torch.where(part.p.abs() > 0, part.p, part.q)
        total = total + part.w1 @ (torch.where(on, steep, 0 * steep)[:, None] * part.w0)
    torch.testing.assert_close(total, jacobian, rtol=1e-9, atol=1e-9)
    mixer = affn(3)
    before = copy.deepcopy(mixer.state_dict())
    lipschitz_bound(mixer, "reduced", iterations=5)
    torch.testing.assert_close(mixer.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in mixer.parameters())


def test_ffn_and_the_ffns_of_hosts():
    torch.manual_seed(0)
    ffn = create_mixer("ffn", 4)
    tensors = ffn.state_dict()

    def bound(mixer):
        own = mixer.state_dict()
        mixer.load_state_dict({key: value.view_as(own[key]) for key, value in tensors.items()})
        return lipschitz_bound(mixer, "reduced").bound

    switched = create_mixer("iffn", 4, channel=False, spatial=False)
    bounds = [bound(m) for m in (ffn, switched, Mlp(4, 16), Mlp(4, 16, use_conv=True))]
    assert bounds == pytest.approx([bounds[0]] * 4, rel=1e-12)
    assert steepest_seen(ffn, 4, 500) <= bounds[0]
    silu = bound(create_mixer("ffn", 4, act="silu"))
    assert silu == pytest.approx(bound(Mlp(4, 16, act_layer=nn.SiLU)))
    assert max(silu, bound(Mlp(4, 16, act_layer=nn.ReLU))) < bounds[0]


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        (lambda: create_mixer("iffn", 4).eval(), {}, "not for an IFFN with a spatial part"),
        (lambda: create_mixer("affn", 4, norm="layer").eval(), {}, "not for layer norms; use nor"),
        (lambda: create_mixer("affn", 4), {}, r"training mode .* call mixer\.eval\(\) first"),
        (lambda: create_mixer("glu", 4), {}, "the bound is unknown for GLU; use affn, iffn_bn"),
        (lambda: Mlp(4, 16, act_layer=nn.Tanh), {}, "slopes of Tanh are unknown"),
        (lambda: Mlp(4, 16, norm_layer=nn.LayerNorm), {}, "unknown for an FFN with a norm"),
        (lambda: with_nan(affn(4)), {}, "needs finite weights"),
        (lambda: affn(4), {"method": "sos"}, "method=sos is not one of auto, sdp, reduced"),
        (lambda: affn(4), {"form": "both"}, "form=both is not one of joint, split"),
        (lambda: affn(4), {"solver": "X"}, "solver=X is not one of CLARABEL, SCS"),
        (lambda: affn(4), {"iterations": 0}, "iterations must be at least 1, got 0"),
    ],
)
def test_refused(mixer, options, message):
    refuses(message, lipschitz_bound, mixer(), **options)


@pytest.mark.parametrize("host", SMALLEST)
def test_places_of_channel_mixers_are_known(host):
    with torch.device("meta"):
        backbone = create_backbone(host)
        assert {name for name, _ in backbone.named_modules()} >= set(backbone.channel_places())
        if "channel" not in look_up(host)[0].slots:
            assert not backbone.channel_places()
            return
        other = create_backbone(f"{host}_affn")  # a mixer that fits every host
    assert backbone.channel_places() == [prefix.removesuffix(".") for prefix in other.mixers()]
    assert other.channel_places() == backbone.channel_places()
