"""Hosts that enlarge images: counts, equations, released names, mixers in their slots."""

import itertools

import pytest
import torch
from torch import nn

from backbones import create_backbone, list_mixers
from backbones.analysis.counting import count_parameters
from backbones.hosts.scaffolds.super_resolution import MEAN
from backbones.layers.bicubic import enlarge
from heads.super_resolution import SuperResolver
from tests.families import rest_slow, rest_slow_pairs, shorten
from tests.references import super_resolution as plain

COUNTS = {
    ("ffnet_sr_light", 4): 1_820_592, ("ffnet_sr", 4): 2_412_720, ("bicubic", 4): 0,
    ("edsr_baseline", 2): 1_369_859, ("edsr_baseline", 3): 1_554_499,
    ("edsr_baseline", 4): 1_517_571, ("swinir_light", 2): 910_152, ("swinir_light", 3): 918_267,
    ("swinir_light", 4): 929_628,
}  # fmt: skip


def resolver(name, scale, **options):
    """A whole network of few blocks, in double precision."""
    model = SuperResolver(create_backbone(name, fast=False), scale, **options)
    shorten(model)
    return model.double().eval()


QUICK = [("ffnet_sr_light", 4), ("edsr_baseline", 3), ("swinir_light", 2)]


@pytest.mark.parametrize(("name", "scale"), rest_slow_pairs(list(COUNTS), QUICK))
def test_parameters_are_the_published_ones(name, scale):
    with torch.device("meta"):
        model = SuperResolver(create_backbone(name), scale)
    assert count_parameters(model) == COUNTS[name, scale]


@pytest.mark.parametrize("scale", rest_slow((2, 3, 4), (4,)))
def test_ffnet_sr_equals_its_equations_from_released_names(scale):
    tensors = plain.ffnet_sr_tensors(2, scale)
    model = resolver("ffnet_sr_light", scale)
    model.load_state_dict(model.convert_state_dict(tensors))
    x = torch.rand(2, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    ours, theirs = model(x), plain.ffnet_sr(tensors, x, scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_gradients_of_the_weights_equal_those_of_the_equations():
    tensors = plain.ffnet_sr_tensors(2, 2)
    model = resolver("ffnet_sr_light", 2)
    model.load_state_dict(model.convert_state_dict(tensors))
    x = torch.rand(1, 3, 6, 5, dtype=torch.float64)
    model(x).square().sum().backward()
    leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    plain.ffnet_sr(leaves, x, 2).square().sum().backward()
    theirs = model.convert_state_dict({key: value.grad for key, value in leaves.items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-8, atol=1e-8)


def test_without_its_share_the_anchor_is_nearest_neighbour():
    model = resolver("ffnet_sr_light", 3)
    nn.init.zeros_(model.upsampler.conv.weight)
    nn.init.zeros_(model.upsampler.conv.bias)
    x = torch.rand(1, 3, 4, 5, dtype=torch.float64)
    nearest = x.repeat_interleave(3, dim=2).repeat_interleave(3, dim=3)
    assert torch.equal(model(x), nearest)


@pytest.mark.parametrize("scale", rest_slow((2, 3, 4), (4,)))
def test_edsr_equals_its_equations_from_released_names(scale):
    generator = torch.Generator().manual_seed(scale)
    model = SuperResolver(create_backbone("edsr_baseline", fast=False), scale).double().eval()
    widths = {"head.0": (64, 3), "body.16": (64, 64), "tail.1": (3, 64)}
    widths |= {f"body.{i}.body.{j}": (64, 64) for i, j in itertools.product(range(16), (0, 2))}
    factors = {2: [2], 3: [3], 4: [2, 2]}[scale]
    widths |= {f"tail.0.{2 * i}": (64 * f * f, 64) for i, f in enumerate(factors)}
    tensors = {"sub_mean.weight": torch.ones(3, 3, 1, 1), "add_mean.bias": torch.ones(3)}
    for name, (out, inner) in widths.items():
        shape = (out, inner, 3, 3)
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) / (9 * inner) ** 0.5
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.bias"] = torch.randn(out, generator=generator, dtype=torch.float64)
    model.load_state_dict(model.convert_state_dict(tensors))
    x = torch.rand(1, 3, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain.edsr(tensors, x, scale), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", rest_slow((2, 3, 4), (2,)))
def test_swinir_equals_spandrels_from_released_names(scale):
    spandrel = pytest.importorskip("spandrel.architectures.SwinIR")
    network = vars(spandrel)["SwinIR"]
    torch.manual_seed(scale)
    theirs = network(
        upscale=scale, img_size=64, window_size=8, img_range=1.0, depths=[2, 2],
        embed_dim=60, num_heads=[6, 6], mlp_ratio=2, upsampler="pixelshuffledirect",
        resi_connection="1conv",
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    theirs.mean = torch.tensor(MEAN, dtype=torch.float64).view(1, 3, 1, 1)  # float32 by default
    model = resolver("swinir_light", scale)
    model.load_state_dict(model.convert_state_dict(theirs.state_dict()))
    for size in ((24, 16), (8, 8), (13, 19)):  # the last one is mirrored to whole windows
        x = torch.rand(1, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=1e-9)


def test_bicubic_shares_pixel_centres_with_imresize():
    x = torch.rand(1, 3, 5, 7, dtype=torch.float64)
    for scale in (2, 3, 4):
        theirs = plain.imresize(x[0].permute(1, 2, 0).numpy(), scale)
        ours = enlarge(x, scale)[0].permute(1, 2, 0).numpy()
        assert abs(ours - theirs).max() < 1e-12
        assert torch.equal(resolver("bicubic", scale)(x), enlarge(x, scale))


# Of mixers with groups of channels, whose default does not divide SwinIR's width of 60.
OF_60 = {"ggqpe": {"groups": 4}, "glrpe": {"groups": 4}}


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ffnet_sr_light", "swinir_light"])
@pytest.mark.parametrize("kind", ["channel", "token"])
def test_every_mixer_fits(host, kind):
    x = torch.rand(2, 3, 8, 8)
    for name in list_mixers(kind):
        own = OF_60.get(name, {}) if host == "swinir_light" else {}
        given = {"token_mixer": {"name": name, **own}} if kind == "token" else {}
        named = host if kind == "token" or name == "ffn" else f"{host}_{name}"
        with torch.device("meta"):
            backbone = shorten(create_backbone(named, img_size=8, fast=False, **given))
            model = SuperResolver(backbone, 2)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05)
        backbone.load_state_dict(backbone.state_dict())  # computes tables of indices
        model.loss({"low": x, "high": torch.rand(2, 3, 16, 16)})["loss_l1"].backward()
        lost = [key for key, one in model.named_parameters() if one.grad is None]
        assert not lost, (name, lost)
