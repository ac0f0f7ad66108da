"""Baselines of forecasting: naive ones, NLinear, DLinear, PatchTST and iTransformer."""

import pytest
import torch

from backbones import create_backbone, list_backbones
from heads.forecasting import Forecaster
from tests.errors import refuses
from tests.references import series as reference
from tests.tensors import randomise, tokens

HOSTS = (
    "ffnet_1d",
    "last_value",
    "seasonal_naive",
    "nlinear",
    "dlinear",
    "patchtst",
    "itransformer",
)


def forecaster(name, horizon=6, targets=3, lookback=32, **options):
    backbone = create_backbone(name, img_size=lookback, fast=False, **options)
    return Forecaster(backbone, horizon, targets).double().eval()


def small(name):
    """Options of a small network."""
    return {
        "ffnet_1d": {"variables": 3, "dim": 8, "expansion": 2},
        "patchtst": {"dim": 16, "depth": 2, "heads": 4},
        "itransformer": {"dim": 16, "depth": 2, "heads": 4},
    }.get(name, {})


@pytest.mark.parametrize("name", HOSTS)
def test_every_host_forecasts_and_embeds(name):
    model = forecaster(name, **small(name))
    series = tokens(2, 32, 3)
    assert model(series).shape == (2, 6, 3)
    assert model.backbone.embed(series).shape == (2, model.backbone.num_features)
    assert model(series)[:1].equal(model(series[:1])) or torch.allclose(
        model(series)[:1], model(series[:1]), atol=1e-12
    )


def test_naive_forecasts_repeat():
    series = tokens(2, 32, 3)
    assert torch.equal(forecaster("last_value")(series), series[:, -1:].expand(-1, 6, -1))
    found = forecaster("seasonal_naive", period=4)(series)
    assert torch.equal(found, series[:, [28, 29, 30, 31, 28, 29]])
    refuses("period must be from 1 to 32, got 40", forecaster, "seasonal_naive", period=40)


def test_nlinear_and_dlinear_equal_their_equations():
    series = 3 + tokens(2, 32, 3)
    model = randomise(forecaster("nlinear"))
    linear = model.forecaster.linear
    wanted = reference.nlinear(series, linear.weight, linear.bias)
    torch.testing.assert_close(model(series), wanted, rtol=1e-9, atol=1e-9)
    model = randomise(forecaster("dlinear"))
    pairs = [(one.weight, one.bias) for one in (model.forecaster.seasonal, model.forecaster.trend)]
    torch.testing.assert_close(
        model(series), reference.dlinear(series, *pairs), rtol=1e-9, atol=1e-9
    )
    assert sum(one.numel() for one in model.parameters()) == 2 * (32 * 6 + 6)


def test_dlinear_may_start_at_the_mean_of_the_series():
    series = 3 + tokens(2, 32, 3)
    model = forecaster("dlinear", start="mean")
    shift = model.forecaster.seasonal.bias + model.forecaster.trend.bias
    wanted = series.mean(dim=1, keepdim=True) + shift[:, None]
    torch.testing.assert_close(model(series), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "norm"), [("itransformer", "by_layer"), ("patchtst", "by_running")]
)
def test_encoder_layers_equal_the_papers(name, norm):
    backbone = randomise(forecaster(name, **small(name)).backbone)
    x = tokens(2, 5, 16)
    tensors = {key: value.detach() for key, value in backbone.blocks[0].state_dict().items()}
    wanted = reference.encoder_layer(x, tensors, 4, getattr(reference, norm))
    torch.testing.assert_close(backbone.blocks[0](x), wanted, rtol=1e-9, atol=1e-9)


def test_patches_are_those_of_the_paper():
    """96 steps give (96 - 16) / 8 + 2 = 12 patches; the last one repeats the last value."""
    backbone = create_backbone("patchtst", img_size=96)
    assert backbone.num_tokens(96) == 12
    assert backbone.num_tokens(336) == 42
    seen = []
    backbone.stem.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    series = torch.arange(96.0).reshape(1, 96, 1)
    backbone(series)
    assert seen[0][0, 0].tolist() == list(range(16))
    assert seen[0][0, -1].tolist() == [*range(88, 96), *[95] * 8]


def test_itransformer_takes_only_mixers_that_ignore_the_order():
    names = set(list_backbones("itransformer*"))
    assert {"itransformer", "itransformer_glu", "itransformer_swiglu"} <= names
    assert not names & {"itransformer_convglu", "itransformer_afbo", "itransformer_convnext"}
    with pytest.raises(
        ValueError, match=r"pooling does not serve itransformer, .*takes .*attention"
    ):
        create_backbone("itransformer", token_mixer="pooling")
    for name in sorted(names):
        model = forecaster(name, token_mixer="attention", **small("itransformer"))
        randomise(model)
        series, order = tokens(1, 32, 3), [2, 0, 1]
        torch.testing.assert_close(
            model(series)[..., order], model(series[..., order]), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", ["itransformer", "patchtst"])
def test_any_number_of_variables(name):
    model = forecaster(name, targets=9, **small(name))
    assert model(tokens(1, 32, 9)).shape == (1, 6, 9)
