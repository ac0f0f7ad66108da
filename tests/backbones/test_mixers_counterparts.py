"""AFBO's counterparts against their equations, their sizes, and what they refuse."""

import functools

import pytest
import torch

from backbones import create_backbone, create_mixer, list_backbones
from backbones.analysis.counting import count_macs, count_parameters
from backbones.layers.grouped_linear import GroupedLinear
from heads.linear import LinearClassifier
from tests.families import rest_slow
from tests.references import counterparts as reference
from tests.rows import SHAPES, published_rows
from tests.tensors import build_mixer, tokens

gated, scheme = reference.gated, reference.scheme

# Mixer, its options, and its equation. Channels come from DIMS, hidden widths from the ratio.
CASES = {
    "glu": ("glu", {"hidden_ratio": 2.5}, gated),
    "glu_sigmoid": ("glu", {"act": "sigmoid"}, functools.partial(gated, act="sigmoid")),
    "swiglu": ("swiglu", {}, gated),
    "swiglu_norm": ("swiglu", {"norm": True}, functools.partial(gated, norm=True)),
    "group_ffn_2": ("group_ffn", {}, gated),
    "group_ffn_4": ("group_ffn", {"groups": 4, "hidden_ratio": 6}, gated),
    "group_ffn_1_relu": (
        "group_ffn",
        {"groups": 1, "act": "relu", "hidden_ratio": 1.25},
        functools.partial(gated, act="relu"),
    ),
    "convglu": ("convglu", {}, reference.convglu),
    "convglu_wide": ("convglu", {"hidden_ratio": 3.1}, reference.convglu),
    "convnext": ("convnext", {}, reference.convnext),
    "convnext_3": ("convnext", {"kernel_size": 3, "hidden_ratio": 1.5}, reference.convnext),
    "convnext_v2": ("convnext_v2", {}, reference.convnext),
    "convnext_v2_5": ("convnext_v2", {"kernel_size": 5, "hidden_ratio": 2}, reference.convnext),
    "scheme_12": ("scheme_12", {}, functools.partial(scheme, with_attention=False)),
    "scheme_44": ("scheme_44", {}, functools.partial(scheme, with_attention=False)),
    "scheme_21": (
        "scheme_12",
        {"g1": 2, "g2": 1, "hidden_ratio": 1.5, "cca": "always"},
        functools.partial(scheme, with_attention=True),
    ),
    "cheby_kan": ("cheby_kan", {}, reference.cheby_kan),
    "cheby_kan_1": ("cheby_kan", {"degree": 1}, reference.cheby_kan),
    "cheby_kan_3": ("cheby_kan", {"degree": 3}, reference.cheby_kan),
}
DIMS = (4, 8)
SIZES = [(3, 5), (1, 4), (4, 3), (1, 1)]
SPATIAL = {"convglu", "convnext", "convnext_v2"}
exact = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def assert_same(mixer, equation, x):
    """Values and all gradients, and the values once more without autograd."""
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
    for one, other in zip(ours, theirs, strict=True):
        exact(one, other)


# Grouped linear layer


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


def test_grouped_linear_is_a_grouped_convolution():
    layer = GroupedLinear(12, 24, 3).double()
    x = tokens(2, 5, 4, 12)
    weight = layer.weight.reshape(24, 4, 1, 1)
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight, layer.bias, groups=3)
    with torch.no_grad():
        exact(layer(x), y.permute(0, 2, 3, 1).detach())


# SCHEME in its two modes


@pytest.mark.parametrize("size", rest_slow(SIZES, SIZES[:2]), ids=str)
@pytest.mark.parametrize("name", ["scheme_12", "scheme_44"])
@pytest.mark.parametrize(
    ("cca", "training", "with_attention"),
    [
        ("train", True, True),
        ("train", False, False),
        ("always", True, True),
        ("always", False, True),
        ("off", True, False),
        ("off", False, False),
    ],
)
def test_scheme_attends_when_it_is_told_to(name, cca, training, with_attention, size):
    mixer = build_mixer(name, cca=cca).train(training)
    equation = functools.partial(scheme, with_attention=with_attention)
    assert_same(mixer, equation, tokens(2, *size, 8).requires_grad_())
    used = with_attention or cca == "off"
    assert used == (cca != "train" or training)
    assert ("balance" in dict(mixer.named_parameters())) == (cca != "off")


def test_scheme_adds_the_attention_in_training_alone():
    mixer, x = build_mixer("scheme_44"), tokens(2, 4, 5, 8)
    share = mixer.balance.detach().softmax(0)
    attention = reference.covariance_attention(x, hidden=64)
    exact(mixer.train()(x), share[0] * mixer.eval()(x) + share[1] * attention)


def test_attention_of_scheme_sees_the_map_but_not_where_things_are():
    mixer, x = build_mixer("scheme_12").train(), tokens(1, 4, 5, 8)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = x.flatten(1, 2)[:, order].unflatten(1, (4, 5))
    exact(mixer(shuffled), mixer(x).flatten(1, 2)[:, order].unflatten(1, (4, 5)))
    changed = x.clone()
    changed[0, 0, 0] += 1
    assert not torch.allclose(mixer(changed)[0, 3, 3], mixer(x)[0, 3, 3])
    mixer.eval()
    exact(mixer(changed)[0, 3, 3], mixer(x)[0, 3, 3])


def test_attention_of_scheme_fits_half_precision_on_a_large_map():
    # The sum of squares over this map is 76,800; the largest half is 65,504.
    mixer, x = create_mixer("scheme_44", 16).half().train(), torch.ones(1, 240, 320, 16).half()
    assert (x.flatten(1, 2).transpose(1, 2) @ x.flatten(1, 2)).isinf().all()
    with torch.no_grad():
        assert mixer(x).isfinite().all()


@pytest.mark.parametrize("name", ["scheme_12", "scheme_44"])
def test_scheme_has_no_pair_with_a_class_token(name):
    assert not list_backbones(f"deit_*_{name}")
    with pytest.raises(ValueError, match=f"no deit_b_{name}: .*class token.*; it serves .*swin_t"):
        create_backbone(f"deit_b_{name}")


# Other properties


@pytest.mark.parametrize("name", sorted(SPATIAL))
def test_reach_of_the_convolution(name):
    mixer = build_mixer(name)
    reach = mixer.dwconv.kernel_size[0] // 2
    x = tokens(1, 11, 12, 8)
    changed = x.clone()
    changed[0, 5, 6] += torch.arange(8)
    difference = (mixer(x) - mixer(changed))[0].abs().sum(-1)
    if name == "convnext_v2":  # its response norm sees the whole map
        assert (difference > 0).all()
        return
    rows, columns = difference.nonzero(as_tuple=True)
    assert (rows.min(), rows.max()) == (5 - reach, 5 + reach)
    assert (columns.min(), columns.max()) == (6 - reach, 6 + reach)


def test_one_group_is_glu():
    glu, group = build_mixer("glu", hidden_ratio=4), build_mixer("group_ffn", groups=1)
    tensors = glu.state_dict()
    group.load_state_dict({key: tensors[key].view_as(v) for key, v in group.state_dict().items()})
    exact(group(tokens(2, 3, 8)), glu(tokens(2, 3, 8)))


def test_swiglu_is_glu_with_silu():
    glu, swiglu = build_mixer("glu"), build_mixer("swiglu")
    swiglu.load_state_dict(glu.state_dict())
    exact(swiglu(tokens(2, 3, 8)), glu(tokens(2, 3, 8)))


def test_layer_scale_of_convnext_starts_where_it_is_told_to():
    assert create_mixer("convnext", 4).gamma.tolist() == pytest.approx([1e-6] * 4)
    assert create_mixer("convnext", 4, layer_scale=1).gamma.tolist() == [1.0] * 4


def test_response_norm_starts_as_the_identity():
    grn = create_mixer("convnext_v2", 4).double().grn
    exact(grn(tokens(2, 3, 4, 16)).detach(), tokens(2, 3, 4, 16))


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


def test_chebyshev_layer_is_linear_in_its_coefficients_and_bounded():
    mixer = build_mixer("cheby_kan")
    bound = mixer.coefficients.abs().sum(dim=(0, 1))
    assert (mixer(1e3 * tokens(50, 8)).abs() <= bound + 1e-9).all()
    torch.manual_seed(0)
    assert create_mixer("cheby_kan", 64).coefficients.detach().std() == pytest.approx(
        1 / 576, rel=0.02
    )


# Sizes


# Parameters, and multiply-adds per token of a map, by the width c.
SIZES_BY_WIDTH = {
    "ffn": (lambda c: 8 * c * c + 5 * c, lambda c: 8 * c * c),
    "glu": (lambda c: (3 * c + 2) * (8 * c // 3) + c, lambda c: 3 * c * (8 * c // 3)),
    "swiglu": (lambda c: (3 * c + 2) * (8 * c // 3) + c, lambda c: 3 * c * (8 * c // 3)),
    "group_ffn": (lambda c: 8 * c * c + 9 * c, lambda c: 8 * c * c),
    "convnext": (lambda c: 8 * c * c + 58 * c, lambda c: 8 * c * c + 49 * c),
    "convnext_v2": (lambda c: 8 * c * c + 65 * c, lambda c: 8 * c * c + 49 * c),
    "convglu": (
        lambda c: (3 * c + 12) * (8 * c // 3) + c,
        lambda c: (3 * c + 9) * (8 * c // 3),
    ),
    "scheme_12": (lambda c: 12 * c * c + 9 * c + 2, lambda c: 12 * c * c),
    "scheme_44": (lambda c: 4 * c * c + 9 * c + 2, lambda c: 4 * c * c),
    "cheby_kan": (lambda c: 9 * c * c, lambda c: 9 * c * c),
}


@pytest.mark.parametrize("dim", [24, 64, 96])
@pytest.mark.parametrize("name", [name for name in SIZES_BY_WIDTH if name != "ffn"])
def test_parameters_follow_the_closed_form(name, dim):
    assert count_parameters(create_mixer(name, dim)) == SIZES_BY_WIDTH[name][0](dim)


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
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(f"{host}_{name}"), 1000)
    assert count_parameters(model) == expected_params
    # DeiT's class token skips the convolutions, which makes up to 1e-4 of all.
    assert count_macs(model) == pytest.approx(expected_macs, rel=2e-4)


def test_attention_of_scheme_counts_in_training_only():
    with torch.device("meta"):
        trained, always = (
            LinearClassifier(create_backbone("swin_t_scheme_12", mixer={"cca": cca}), 1000)
            for cca in ("train", "always")
        )
    tokens, widths, depths = (3136, 784, 196, 49), (96, 192, 384, 768), (2, 2, 6, 2)
    extra = sum(d * 2 * c * c * n for n, c, d in zip(tokens, widths, depths, strict=True))
    assert count_macs(always) - count_macs(trained) == extra


# Refusals


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "group_ffn",
            {"groups": 5},
            r"groups must divide the widths 24 and 96: .*of \[1, 2, 3, 4, ",
        ),
        ("group_ffn", {"groups": 0}, r"must be one of \[1, 2, 3, 4, 6, 8, 12, 24\], got 0"),
        ("group_ffn", {"groups": 3, "hidden_ratio": 25 / 24}, r"24 and 25: .* \[1\], got 3"),
        ("group_ffn", {"act": "tanh"}, "act=tanh is not one of silu, gelu, sigmoid, relu, none"),
        ("glu", {"act": "softmax"}, "act=softmax is not one of silu, gelu, sigmoid, relu, none"),
        ("scheme_12", {"g2": 7}, r"g2 must divide the widths 192 and 24: .* 12, 24\], got 7"),
        ("scheme_44", {"g1": 5}, r"g1 must divide the widths 24 and 192: .*, got 5"),
        ("scheme_44", {"cca": "eval"}, r"cca=eval is not one of train, always, off"),
        ("convnext", {"kernel_size": 6}, r"kernel_size must be odd .*, got 6"),
        ("convnext_v2", {"kernel_size": 0}, r"kernel_size must be odd .*, got 0"),
        ("cheby_kan", {"degree": 0}, r"degree must be at least 1, got 0"),
    ],
    ids=str,
)
def test_refused_options_name_the_valid_ones(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_mixer(name, 24, **options)


@pytest.mark.parametrize("name", ["glu", "swiglu", "group_ffn", "convglu", "scheme_44"])
def test_dropout_acts_in_training_only(name):
    options = {"cca": "off"} if name == "scheme_44" else {}
    mixer, x = build_mixer(name, drop=0.5, **options), tokens(2, 3, 4, 8)
    exact(mixer(x), build_mixer(name, **options)(x))
    mixer.train()
    assert not torch.allclose(mixer(x), mixer(x))


@pytest.mark.slow  # of the default tests one host and two other mixers are compiled
@pytest.mark.parametrize("name", ["group_ffn", "convglu", "convnext_v2", "scheme_44", "cheby_kan"])
@torch.no_grad()
def test_compiles_into_one_graph(name):
    mixer, x = build_mixer(name), tokens(2, 3, 4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    exact(compiled(x), mixer(x))
