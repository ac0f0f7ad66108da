"""FFNet_1D against a plain second form, its parts, its counts, and mixers in its slots."""

import pytest
import torch

from backbones import create_backbone, list_backbones, list_mixers
from backbones.analysis.counting import count_macs, count_parameters
from backbones.fast import fast
from backbones.hosts.ffnet_1d.blocks import CIFFN, CVIFFN
from backbones.layers.row_conv import row_conv
from backbones.registry import find_mixer
from heads.forecasting import Forecaster, revin
from tests.references import ffnet_1d as reference
from tests.tensors import randomise, tokens
from tools.papers.published import load_rows

SIZES = {"m": 3, "d": 4, "e": 3, "horizon": 5, "lookback": 24, "kernels": (11, 5)}


def network(e=3, variables=3, dim=4, horizon=5, **options):
    backbone = create_backbone(
        "ffnet_1d", img_size=24, variables=variables, dim=dim, expansion=e, kernel_size=11,
        drop=0.0, **options,
    )  # fmt: skip
    return Forecaster(backbone, horizon, variables).double()


def load(model, tensors):
    own = model.backbone.convert_state_dict(dict(tensors))
    head = {key: own.pop(key) for key in list(own) if key.startswith("forecaster.")}
    model.load_state_dict({f"backbone.{key}": value for key, value in own.items()} | head)
    return model


def ffn_views(ffn, first, second, e):
    return (
        ffn.fc1.weight.reshape(first, e * second, second), ffn.fc1.bias.reshape(first, -1),
        ffn.fc2.weight.reshape(second, first, e, first), ffn.fc2.bias.reshape(second, first),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [CVIFFN, CIFFN])
def test_feed_forward_networks_equal_their_equations(kind):
    m, d, e = 3, 5, 2
    ffn = randomise(kind(d, e, m, (0.0, 0.0)))
    x = tokens(2, m, d, 7).requires_grad_()
    first = (reference.cviffn, d, m) if kind is CVIFFN else (reference.ciffn, m, d)
    wanted = first[0](x, *ffn_views(ffn, first[1], first[2], e))
    found = ffn(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = tokens(*wanted.shape, seed=5)
    inputs = [x, *ffn.parameters()]
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_two_orders_of_mixing_differ():
    """With as many variables as channels the same weights fit both, but not the same function."""
    size, e = 4, 2
    one, other = (kind(size, e, size, (0.0, 0.0)) for kind in (CVIFFN, CIFFN))
    randomise(one)
    other.double().load_state_dict(one.state_dict())
    x = tokens(1, size, size, 3)
    assert (one(x) - other(x)).abs().max() > 0.1
    torch.testing.assert_close(one(x.transpose(1, 2)).transpose(1, 2), other(x))


def test_revin_is_exact_and_undone():
    x = 5 + 3 * tokens(2, 24, 3)
    wanted, mean, deviation = reference.revin(x)
    shift, scale = revin(x)
    torch.testing.assert_close((x - shift) / scale, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((shift, scale), (mean, deviation), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [False, True])
def test_the_network_equals_a_second_form_from_the_authors_keys(training):
    tensors = reference.draw(**SIZES)
    model = load(network(), tensors).train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    series, truth = 2 + tokens(3, 24, 3), tokens(3, 5, 3, seed=2)
    own = {key: value.clone().requires_grad_() for key, value in tensors.items() if value.ndim}
    wanted = reference.forecast(series, tensors | own, 3, training)
    found = model(series)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    (found * truth).sum().backward()
    (wanted * truth).sum().backward()
    gradients = {key: value.grad for key, value in own.items() if value.grad is not None}
    renamed = model.backbone.convert_state_dict(gradients)
    compared = 0
    for name, parameter in model.named_parameters():
        gradient = renamed[name.removeprefix("backbone.")]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-9)
        compared += 1
    assert compared == 28


def test_the_fused_form_is_equal():
    model = load(network(), reference.draw(**SIZES)).eval()
    series = tokens(2, 24, 3)
    before = model(series)
    model.backbone.fuse()
    assert not any("branches" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(model(series), before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("variables", "expansion", "params"),
    [(7, 2, 499_104), (21, 12, 2_136_992), (321, 12, 114_725_792), (862, 12, 725_423_904)],
)
def test_counts_of_the_published_networks(variables, expansion, params):
    """0.50, 2.1, 114.7 and 725.4 M for ETTh1, weather, ECL and Traffic at horizon 96."""
    with torch.device("meta"):
        backbone = create_backbone("ffnet_1d", variables=variables, expansion=expansion)
        model = Forecaster(backbone, 96, variables)
    assert sum(parameter.numel() for parameter in model.parameters()) == params


@pytest.mark.parametrize("row", load_rows("ffnet", "forecasting"), ids=lambda row: row.name)
def test_counts_of_the_papers_rows(row):
    sets = {"weather": (21, 12), "ecl": (321, 12), "traffic": (862, 12), "exchange": (8, 1)}
    variables, expansion = sets.get(row.train.data, (7, 2))
    options = {"variables": variables, "expansion": expansion}
    with torch.device("meta"):
        own = options if row.backbone == "ffnet_1d" else {}
        model = Forecaster(create_backbone(row.backbone, **own, **row.options), 96, variables)
    assert count_parameters(model) == row.params
    if row.macs is not None:
        assert count_macs(model, shape=(96, variables)) == row.exact_macs
    assert bool(row.quoted) == (row.backbone != "ffnet_1d")


@pytest.mark.parametrize("mixer", list_mixers("token"))
def test_token_mixers_see_each_variable_as_one_row(mixer):
    backbone = create_backbone(
        "ffnet_1d", img_size=32, variables=2, dim=16, expansion=2, token_mixer=mixer
    ).eval()
    series = torch.randn(2, 32, 2)
    (found,) = backbone(series)
    assert found.shape == (2, 16, 2, 16)
    square = [
        name
        for name, one in backbone.blocks[0].token_mixer.named_modules()
        if len(getattr(one, "kernel_size", ())) == 2 and one.kernel_size[0] > 1
    ]
    assert not square


def test_variables_do_not_meet_in_mixers_but_in_the_hosts_own():
    """A replaced mixer treats variables apart; CVIFFN and CIFFN let them meet."""

    def meets(**options):
        backbone = create_backbone(
            options.pop("name", "ffnet_1d"), img_size=16, variables=3, dim=8, expansion=2, **options
        ).eval()
        one, other = torch.zeros(1, 16, 3), torch.zeros(1, 16, 3)
        other[..., 2] = torch.randn(16)
        return bool((backbone(one)[0] - backbone(other)[0])[:, :, 0].abs().max() > 0)

    assert meets()
    assert not meets(name="ffnet_1d_afbo", token_mixer="pooling")


def test_one_row_kernels_are_exact():
    """1 x k kernels of a mixer for one row give what k x k ones give on it, for AFBO's counts."""
    from backbones import create_mixer
    from backbones.layers.one_row import keep_centre_row

    names = ("ffnified", "pooling", "large_kernel", "local_global", "moga", "rasa", "sra")
    for name, kind in (("afbo", "channel"), *((name, "token") for name in names)):
        assert find_mixer(name).kind == kind
        square = randomise(create_mixer(name, 16, grid=(14, 14)))
        x = tokens(2, 1, 9, 16)
        wanted = square(x)
        keep_centre_row(square)
        torch.testing.assert_close(square(x), wanted, rtol=1e-9, atol=1e-9)
    row = sum(p.numel() for p in create_mixer("afbo", 768, grid=(1, 128)).parameters())
    without = sum(p.numel() for p in create_mixer("afbo_c", 768, grid=(1, 128)).parameters())
    assert row - without == 2 * 3072 * (3 + 1)


def test_wrong_numbers_of_variables_are_refused():
    with pytest.raises(ValueError, match=r"for 7 variables, got 3; pass backbone\.variables=3"):
        create_backbone("ffnet_1d", expansion=1)(torch.zeros(1, 96, 3))


def test_all_channel_mixers_have_names():
    names = {f"ffnet_1d_{mixer}" for mixer in list_mixers("channel") if mixer != "ffn"}
    assert names | {"ffnet_1d"} == set(list_backbones("ffnet_1d*"))


@pytest.mark.parametrize(("size", "side", "bias"), [(48, 51, True), (9, 5, False), (4, 11, True)])
def test_the_fast_form_of_long_kernels_is_equal(size, side, bias):
    plain = randomise(row_conv(6, side, bias=bias))
    quick = fast(torch.nn.Sequential(row_conv(6, side, bias=bias)))[0]
    quick.double().load_state_dict(plain.state_dict())
    x = tokens(2, 6, 3, size).requires_grad_()
    assert quick.is_fast(x)
    found, wanted = quick(x), plain(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = tokens(*wanted.shape, seed=3)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), [x, *quick.parameters()]),
        torch.autograd.grad((wanted * weight).sum(), [x, *plain.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
