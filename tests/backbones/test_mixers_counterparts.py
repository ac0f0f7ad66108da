"""AFBO's counterparts against their equations, their sizes, and what they refuse."""

import functools

import pytest
import torch

from backbones import create_mixer
from backbones.analysis.counting import count_macs, count_parameters
from backbones.layers.grouped_linear import GroupedLinear
from tests.families import meta_classifier, rest_slow
from tests.references import counterparts as reference
from tests.rows import SHAPES, published_rows
from tests.tensors import build_mixer, tokens

gated, scheme = reference.gated, reference.scheme

# Mixer, its options, and its equation. Channels come from DIMS, hidden widths from the ratio.
CASES = {
    "glu": ("glu", {"hidden_ratio": 2.5}, gated),
    "glu_sigmoid": ("glu", {"act": "sigmoid"}, functools.partial(gated, act="sigmoid")),
    **{
        f"glu_{act}": ("glu", {"act": act}, functools.partial(gated, act=act))
        for act in ("silu", "gelu", "relu")
    },
    "swiglu": ("swiglu", {}, gated),
    "swiglu_norm": ("swiglu", {"norm": True}, functools.partial(gated, norm=True)),
    "group_ffn_2": ("group_ffn", {}, gated),
    "group_ffn_4": ("group_ffn", {"groups": 4, "hidden_ratio": 6}, gated),
    "group_ffn_1_relu": ("group_ffn", {"groups": 1, "act": "relu", "hidden_ratio": 1.25},
     functools.partial(gated, act="relu")),
    "convglu": ("convglu", {}, reference.convglu),
    "convglu_wide": ("convglu", {"hidden_ratio": 3.1}, reference.convglu),
    "convnext": ("convnext", {}, reference.convnext),
    "convnext_3": ("convnext", {"kernel_size": 3, "hidden_ratio": 1.5}, reference.convnext),
    "convnext_v2": ("convnext_v2", {}, reference.convnext),
    "convnext_v2_5": ("convnext_v2", {"kernel_size": 5, "hidden_ratio": 2}, reference.convnext),
    "scheme_12": ("scheme_12", {}, functools.partial(scheme, with_attention=False)),
    "scheme_44": ("scheme_44", {}, functools.partial(scheme, with_attention=False)),
    "scheme_21": ("scheme_12", {"g1": 2, "g2": 1, "hidden_ratio": 1.5, "cca": "always"},
     functools.partial(scheme, with_attention=True)),
    "cheby_kan": ("cheby_kan", {}, reference.cheby_kan),
    "cheby_kan_1": ("cheby_kan", {"degree": 1}, reference.cheby_kan),
    "cheby_kan_3": ("cheby_kan", {"degree": 3}, reference.cheby_kan),
}  # fmt: skip
DIMS = (4, 8)
SIZES = [(3, 5), (1, 4), (4, 3), (1, 1)]
SPATIAL = {"convglu", "convnext", "convnext_v2"}
exact = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def assert_same(mixer, equation, x):
    tensors = dict(mixer.named_parameters())
    found, expected = mixer(x), equation(x, tensors)
    exact(found, expected)
    pairs = [
        torch.autograd.grad(y.sin().sum(), [x, *tensors.values()], allow_unused=True)
        for y in (found, expected)
    ]
    for ours, theirs in zip(*pairs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            exact(ours, theirs)
    with torch.inference_mode():
        exact(mixer(x.detach()), expected)


@pytest.mark.parametrize("size", rest_slow(SIZES, SIZES[:2]), ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_its_equation(case, dim, size):
    name, options, equation = CASES[case]
    for batch in (1, 3):
        x = tokens(batch, *size, dim).requires_grad_()
        assert_same(build_mixer(name, dim, **options), equation, x)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] in SPATIAL])
def test_class_tokens_skip_the_convolution_only(case):
    name, options, equation = CASES[case]
    mixer = build_mixer(name, **options)
    prefix = tokens(2, 3, 8).requires_grad_()
    mixed, mixed_prefix = mixer(tokens(2, 3, 4, 8), prefix)
    tensors = dict(mixer.named_parameters())
    # Every token is a map of its own.
    alone = equation(prefix.reshape(6, 1, 1, 8), tensors, skip_conv=True).reshape(2, 3, 8)
    exact(mixed_prefix, alone)
    exact(mixed, equation(tokens(2, 3, 4, 8), tensors))
    inputs = [prefix, *(tensors[key] for key in tensors if "dwconv" not in key)]
    ours = torch.autograd.grad(mixed_prefix.sin().sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad(alone.sin().sum(), inputs)
    exact(ours, theirs)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("widths", [(12, 24), (24, 12), (12, 12)], ids=str)
def test_grouped_linear_equals_its_matrix_however_it_is_computed(widths, groups):
    layer = GroupedLinear(*widths, groups).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    matrix = reference.block_diagonal(layer.weight.detach())
    for shape in [(5,), (2, 3), (2, 1, 4), (0, 3)]:
        x = tokens(*shape, widths[0])
        expected = x @ matrix.T + layer.bias.detach()
        exact(layer(x).detach(), expected)
        with torch.no_grad():
            exact(layer(x), expected)
            exact(layer(x.flip(-1).flip(-1)), expected)
            strided = x.transpose(0, -2).contiguous().transpose(0, -2) if x.ndim > 2 else x
            exact(layer(strided), expected)


@pytest.mark.parametrize("size", rest_slow(SIZES, SIZES[:2]), ids=str)
@pytest.mark.parametrize("name", ["scheme_12", "scheme_44"])
@pytest.mark.parametrize(
    ("cca", "training", "with_attention"),
    [
        ("train", True, True), ("train", False, False), ("always", True, True),
        ("always", False, True), ("off", True, False), ("off", False, False),
    ],
)  # fmt: skip
def test_attention_of_scheme_follows_cca_and_mode(name, cca, training, with_attention, size):
    mixer = build_mixer(name, cca=cca).train(training)
    equation = functools.partial(scheme, with_attention=with_attention)
    assert_same(mixer, equation, tokens(2, *size, 8).requires_grad_())
    assert ("balance" in dict(mixer.named_parameters())) == (cca != "off")


def test_attention_of_scheme_fits_half_precision_and_counts_in_training():
    # The sum of squares over this map is 76,800; the largest half is 65,504.
    mixer, x = create_mixer("scheme_44", 16).half().train(), torch.ones(1, 240, 320, 16).half()
    assert (x.flatten(1, 2).transpose(1, 2) @ x.flatten(1, 2)).isinf().all()
    with torch.no_grad():
        assert mixer(x).isfinite().all()
    trained, always = (
        meta_classifier("swin_t_scheme_12", mixer={"cca": cca}) for cca in ("train", "always")
    )
    tokens, widths, depths = (3136, 784, 196, 49), (96, 192, 384, 768), (2, 2, 6, 2)
    extra = sum(d * 2 * c * c * n for n, c, d in zip(tokens, widths, depths, strict=True))
    assert count_macs(always) - count_macs(trained) == extra


def test_initial_scales_and_bounds():
    assert create_mixer("convnext", 4).gamma.tolist() == pytest.approx([1e-6] * 4)
    assert create_mixer("convnext", 4, layer_scale=1).gamma.tolist() == [1.0] * 4
    grn = create_mixer("convnext_v2", 4).double().grn
    exact(grn(tokens(2, 3, 4, 16)).detach(), tokens(2, 3, 4, 16))
    mixer = build_mixer("cheby_kan")
    bound = mixer.coefficients.abs().sum(dim=(0, 1))
    assert (mixer(1e3 * tokens(50, 8)).abs() <= bound + 1e-9).all()
    torch.manual_seed(0)
    assert create_mixer("cheby_kan", 64).coefficients.detach().std() == pytest.approx(
        1 / 576, rel=0.02
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_response_norm_survives_channels_that_are_off_or_large(dtype):
    grn = create_mixer("convnext_v2", 1).grn
    torch.nn.init.ones_(grn.weight)
    x = torch.zeros(1, 2, 2, 4, dtype=dtype)
    x[..., 0] = 300  # its square is no half
    x.requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
        y = grn(x)
    # Norms 600, 0, 0, 0 have the mean 150: the response of channel 0 is 4.
    torch.testing.assert_close(
        y.detach()[0, 0, 0].double().tolist(), [1500.0, 0.0, 0.0, 0.0], rtol=1e-5, atol=0
    )
    y.sum().backward()
    assert x.grad.isfinite().all()


# Parameters, and multiply-adds per token of a map, by the width c.
SIZES_BY_WIDTH = {
    "ffn": (lambda c: 8 * c * c + 5 * c, lambda c: 8 * c * c),
    "glu": (lambda c: (3 * c + 2) * (8 * c // 3) + c, lambda c: 3 * c * (8 * c // 3)),
    "swiglu": (lambda c: (3 * c + 2) * (8 * c // 3) + c, lambda c: 3 * c * (8 * c // 3)),
    "group_ffn": (lambda c: 8 * c * c + 9 * c, lambda c: 8 * c * c),
    "convnext": (lambda c: 8 * c * c + 58 * c, lambda c: 8 * c * c + 49 * c),
    "convnext_v2": (lambda c: 8 * c * c + 65 * c, lambda c: 8 * c * c + 49 * c),
    "convglu": (lambda c: (3 * c + 12) * (8 * c // 3) + c, lambda c: (3 * c + 9) * (8 * c // 3)),
    "scheme_12": (lambda c: 12 * c * c + 9 * c + 2, lambda c: 12 * c * c),
    "scheme_44": (lambda c: 4 * c * c + 9 * c + 2, lambda c: 4 * c * c),
    "cheby_kan": (lambda c: 9 * c * c, lambda c: 9 * c * c),
}


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("glu", {"hidden_ratio": 4}, lambda c: 12 * c * c + 9 * c),
        ("swiglu", {"norm": True}, lambda c: 8 * c * c + 32 * c // 3 + c),
        ("group_ffn", {"groups": 4}, lambda c: 6 * c * c + 9 * c),
        ("group_ffn", {"groups": 4, "hidden_ratio": 6}, lambda c: 9 * c * c + 13 * c),
        ("scheme_12", {"cca": "off"}, lambda c: 12 * c * c + 9 * c),
        ("scheme_44", {"g1": 2, "hidden_ratio": 4}, lambda c: 3 * c * c + 5 * c + 2),
        ("convnext", {"kernel_size": 3}, lambda c: 8 * c * c + 18 * c),
        ("cheby_kan", {"degree": 3}, lambda c: 4 * c * c),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_parameters_follow_the_options(name, options, parameters):
    assert count_parameters(create_mixer(name, 24, **options)) == parameters(24)


@pytest.mark.parametrize(
    "host", rest_slow(["deit_t", "swin_t", "poolformer_s12"], ["poolformer_s12"])
)
@pytest.mark.parametrize("name", [name for name in SIZES_BY_WIDTH if name not in ("ffn", "glu")])
def test_every_pair_has_the_size_that_its_parts_have(name, host):
    if host == "deit_t" and name.startswith("scheme"):
        return
    (params, macs), (ffn_params, ffn_macs) = SIZES_BY_WIDTH[name], SIZES_BY_WIDTH["ffn"]
    expected_params, expected_macs = published_rows()[host]
    expected_macs *= 1e9
    for dim, depth, n in zip(*SHAPES[host], strict=True):
        expected_params += depth * (params(dim) - ffn_params(dim))
        expected_macs += depth * n * (macs(dim) - ffn_macs(dim))
    model = meta_classifier(f"{host}_{name}")
    assert count_parameters(model) == expected_params
    # DeiT's class token skips the convolutions, which makes up to 1e-4 of all.
    assert count_macs(model) == pytest.approx(expected_macs, rel=2e-4)
