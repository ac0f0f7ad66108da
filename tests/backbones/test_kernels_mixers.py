"""Compiled operators of mixers equal torch's operations and step aside where they must."""

import copy
import functools

import pytest
import torch
from torch.autograd import forward_ad

from backbones.fast import fast, switched_off
from backbones.fast.cpu import afbo, iffn, linear, sbm
from backbones.layers.conv_pos_enc import ConvPosEnc
from tests.both_ways import both_ways
from tests.forms import build_fast, compiled
from tests.tensors import randomise, tokens
from tests.threads import torch_threads

pytestmark = [compiled, pytest.mark.usefixtures("no_grad")]
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
eval_or_train = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
both_operators = pytest.mark.parametrize(
    ("name", "part", "operator"),
    [
        ("afbo", "sm_a", "gated_mixer"), ("iffn_bn", "dw.conv", "branched_mixer"),
        ("iffn", "dw.conv", "layered_mixer"),
    ],
)  # fmt: skip
SIZES = [(1, 7), (9, 1), (5, 6), (70, 61)]  # lines, columns, a map in many pieces


def build(name, **options):
    """Return a small fast mixer and a map for it."""
    options = {"grid": (4, 5), "rank": 3, **options} if name == "sbm" else options
    return build_fast(name, 8, **options), tokens(2, 4, 5, 8)


def without_operators(mixer, x):
    with switched_off():
        return mixer(x)


def mix_joined(mixer, joined, size):
    """Mix tokens (B, P + H W, C), as a host with class tokens does."""
    prefix, height, width = size
    x = joined[:, prefix:].unflatten(1, (height, width))
    if not prefix:
        return mixer(x).flatten(1, 2)
    x, rest = mixer(x, joined[:, :prefix])
    return torch.cat([rest, x.flatten(1, 2)], dim=1)


@pytest.mark.parametrize(
    "size", [(0, 1, 1), (0, 7, 4), (0, 1, 7), (2, 9, 1), (1, 5, 6), (1, 70, 61)], ids=str
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("afbo", {}), ("afbo", {"g2": 3, "bias": False}), ("scfbo_gc", {"g1": 4}),
        ("full", {"hidden_ratio": 2.9}),
    ],
    ids=str,
)  # fmt: skip
def test_gated_operator_equals_torch(name, options, size):
    mixer, x = build_fast(name, 40, **options), tokens(3, size[0] + size[1] * size[2], 40)
    found, expected = both_ways(mixer, x, call=functools.partial(mix_joined, size=size))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    with torch.inference_mode():
        again = mix_joined(mixer, x, size)
    torch.testing.assert_close(again, expected[0], rtol=1e-11, atol=1e-11)


@eval_or_train
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"n_branches": 4, "hidden_ratio": 2.9, "bn_out": False}], ids=str
)
@pytest.mark.parametrize("name", ["iffn", "iffn_bn"])
def test_branched_operators_equal_torch(name, options, size, training):
    dim = 40 if options else 24  # both have channels that fill no line of memory
    mixer, x = build_fast(name, dim, **options).train(training), tokens(3, *size, dim)
    # Biases before a norm of the batch have no gradient but rounding's: 1e-10 covers both.
    found, expected = both_ways(mixer, x)
    close(found, expected)
    if not training:
        with torch.inference_mode():
            torch.testing.assert_close(mixer(x), expected[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("name", "training", "bound"),
    [
        ("afbo", False, 2e-5), ("iffn", False, 5e-5), ("iffn", True, 5e-5),
        ("iffn_bn", False, 5e-5), ("iffn_bn", True, 5e-5),
    ],
)  # fmt: skip
def test_results_are_equal_for_any_pieces_and_threads(name, training, bound, threads):
    """Images by the dozen in one piece, and float32 against float64 to its rounding."""
    mixer, x = build_fast(name, 64).train(training), torch.randn(150, 6, 6, 64)
    inputs = (x, torch.randn(150, 1, 64)) if name == "afbo" else (x,)
    expected = both_ways(mixer, *(one.double() for one in inputs))[1]
    with torch_threads(threads):
        found = both_ways(mixer.float(), *inputs)[0]
        with torch.no_grad():
            y, plain = mixer.eval()(x), without_operators(mixer, x)
    torch.testing.assert_close(y, plain, rtol=0, atol=2e-6 * float(plain.abs().max()))
    # What rounding leaves of IFFN's sums over tokens that are zero.
    least = x[..., 0].numel() ** 0.5 if name != "afbo" else 0.0
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=least)
        torch.testing.assert_close(one.double() / scale, other.double() / scale, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("name", "training"),
    [("afbo", False), ("scfbo_gc", False), ("sbm", False), ("lrpe", False), ("ggqpe", False)]
    + [(name, training) for name in ("iffn", "iffn_bn") for training in (False, True)],
)
def test_overflow_is_never_hidden(name, training, monkeypatch):
    """A finite number is right: that of float64, or of torch's operations where they overflow."""
    monkeypatch.setattr(linear, "has_tiles", lambda: True)  # on any processor
    mixer = build(name)[0].float().train(training)
    for power in (10, 15, 19, 20, 21, 22, 26, 30, 35, 38):
        x = tokens(2, 4, 5, 8).float()
        x[0, 2, 2, 5] = 10.0**power
        exact = without_operators(copy.deepcopy(mixer).double(), x.double())
        plainly = without_operators(copy.deepcopy(mixer), x).double()
        assert mixer.is_fast(x)
        ours = mixer(x).double()
        least = 1e-3 * torch.maximum(exact.abs(), plainly.abs()).nan_to_num().amax(-1, keepdim=True)
        is_right = ((ours - exact).abs() <= least) | ((ours - plainly).abs() <= least)
        assert (is_right | ~ours.isfinite()).all(), power


OTHER_FORMS = {
    "afbo": [
        {"kernel_size": 5}, {"sm": "max"}, {"act": "gelu"}, {"act_on": "post"}, {"order": "sc"},
        {"cm_b": "shared"},
    ],
    "iffn": [
        {"kernel_size": 5}, {"act": "silu"}, {"arb": "off"}, {"arb": "rprelu"}, {"channel": False},
        {"spatial": False}, {"bn_mid": False}, {"norm": "batch"}, {"dw_residual": True},
        {"dw_residual": False}, {"dw_order": "act_bn"},
    ],
    "iffn_bn": [
        {"kernel_size": 5}, {"act": "silu"}, {"bn_mid": False}, {"norm": "layer"},
        {"dw_residual": "outside"},
    ],
    "sbm": [
        {"kernel_size": 5}, {"x_width": 1}, {"pre_proj": True}, {"norm": False},
        {"use_gate": False}, {"use_linear": False}, {"use_bilinear": False},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n, given in OTHER_FORMS.items() for o in given], ids=str
)
def test_other_forms_keep_to_torch(name, options):
    mixer, x = build(name, **options)
    assert not mixer.is_fast(x)
    close(mixer(x), without_operators(mixer, x))


@both_operators
@torch.enable_grad()
def test_autocast_and_compilers_keep_to_torch(name, part, operator):
    mixer, x = build(name)
    mixer, x = mixer.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not mixer.is_fast(x)
    assert operator not in str(torch.export.export(mixer, (x,)).graph)
    assert not mixer.bfloat16().is_fast(x.bfloat16())


def gated_arguments():
    return (tokens(2, 17, 8).requires_grad_(), 1, 4, 4, *afbo.operands(build("afbo")[0]), True)


def branched_arguments(name, training):
    first, coefficients, norms, running, eps, _, depthwise, last = iffn.operands(build(name)[0])
    given = (tokens(2, 12, 8).requires_grad_(), 3, 4, *first, coefficients, norms, running, *eps)
    return (*given, training, *depthwise, *last, True)


@torch.no_grad()
def star_arguments():
    mixer, x = build("sbm")
    return x, *sbm.operands(mixer, x)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("gated_mixer", gated_arguments),
        ("branched_mixer", functools.partial(branched_arguments, "iffn_bn", False)),
        ("branched_mixer", functools.partial(branched_arguments, "iffn_bn", True)),
        ("layered_mixer", functools.partial(branched_arguments, "iffn", False)),
        ("layered_mixer", functools.partial(branched_arguments, "iffn", True)),
        ("star_mixer", star_arguments),  # has no gradient
        ("conv_pos_enc", lambda: (torch.ones(2, 3, 4, 5), torch.ones(5, 1, 3, 3), None)),
    ],
    ids=[
        "gated",
        "branched",
        "branched-training",
        "layered",
        "layered-training",
        "star",
        "conv_pos_enc",
    ],
)
@torch.enable_grad()
def test_schemas_and_gradients_of_operators_agree(operator, arguments):
    checks = ["test_schema", "test_autograd_registration"]
    checks = checks[:1] if operator in ("star_mixer", "conv_pos_enc") else checks
    operator = getattr(torch.ops.mixerlab, operator).default
    torch.library.opcheck(operator, arguments(), test_utils=checks)


# Channels that fill lines of memory and that do not; more tokens than go through at a time.
MAPS = [
    (1, (13, 11), 24), (1, (1, 150), 17), (1, (150, 1), 5), (1, (4, 5), 8), (3, (1, 9), 6),
    (2, (9, 1), 19), (2, (13, 11), 24), (1, (7, 6), 64),
]  # fmt: skip
every_map = pytest.mark.parametrize(("batch", "size", "dim"), MAPS, ids=str)


@pytest.mark.parametrize("threads", [1, 2])
@every_map
def test_star_operator_equals_torch(batch, size, dim, threads):
    mixer = build_fast("sbm", dim, grid=(4, 5), rank=3, out_proj=dim == 6)
    x = tokens(batch, *size, dim)
    with torch_threads(threads):
        assert mixer.is_fast(x)
        found = mixer(x)
    with torch.enable_grad():
        expected = mixer(x).detach()
    close(found, expected)
    close(without_operators(mixer, x), expected)
    single = mixer.float()(x.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    assert single.dtype == torch.float32


def test_star_operator_follows_changes_and_steps_aside():
    mixer, x = build("sbm")[0], tokens(2, 6, 7, 8)
    before = mixer(x)
    for parameter in (mixer.bilinear.space_read, mixer.conv.weight, mixer.norm.bias):
        parameter.mul_(1.5)
        after = mixer(x)
        assert not torch.equal(before, after)
        close(after, without_operators(mixer, x))
        before = after
    mixer, x = build("sbm")
    assert mixer.is_fast(x)
    for mode in (torch.enable_grad(), torch.autocast("cpu"), forward_ad.dual_level()):
        with mode:
            assert not mixer.is_fast(x)
    for other in (tokens(2, 1, 3, 8), x.float(), x.transpose(1, 2)):  # the first has 3 tokens
        assert not mixer.is_fast(other)
    handle = mixer.bilinear.proj.register_forward_hook(lambda *_: None)
    assert not mixer.is_fast(x)
    handle.remove()
    mixer.lin_proj.bias = None
    assert not mixer.is_fast(x)
    close(mixer(x), without_operators(mixer, x))


@pytest.mark.parametrize("has_bias", [True, False])
@every_map
def test_a_positional_encoding_equals_torchs(batch, size, dim, has_bias):
    encoding, x = fast(randomise(ConvPosEnc(dim))), tokens(batch, *size, dim)
    if not has_bias:
        encoding.bias = None
    for given in (x, x.transpose(1, 2), x[:0]):
        assert encoding.is_fast(given)
        with switched_off():
            assert not encoding.is_fast(given)
        close(encoding(given), without_operators(encoding, given))
    with torch.enable_grad():
        assert not encoding.is_fast(x)  # the operator has no gradient
        assert encoding(x).requires_grad
