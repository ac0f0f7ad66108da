"""The star with bilinear mapping against its equations, at any map, and its cache."""

import copy

import pytest
import torch

from backbones import create_mixer
from backbones.analysis.counting import count_macs, count_parameters
from backbones.layers.axes import to_nhwc
from backbones.mixers.sbm import resample_factors
from tests.families import meta_backbone, rest_slow_pairs
from tests.forms import both_forms
from tests.references import sbm as reference
from tests.tensors import build_mixer, tokens

EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


GRIDS = [
    ((4, 5), (4, 5)), ((4, 5), (7, 3)), ((6, 3), (2, 2)), ((3, 3), (1, 5)), ((4, 1), (5, 6))
]  # fmt: skip
OPTIONS = [
    {}, {"x_width": 1, "pre_proj": True, "out_proj": True}, {"x_width": 1, "out_proj": True},
    {"pre_proj": True}, {"x_width": 1}, {"use_linear": False}, {"use_bilinear": False},
    {"use_gate": False}, {"use_linear": False, "pre_proj": True, "x_width": 1},
    {"use_bilinear": False, "x_width": 1, "use_gate": False},
    {"use_bilinear": False, "pre_proj": True}, {"norm": False, "kernel_size": 5},
    {"resample": "bilinear", "kernel_size": 1},
]  # fmt: skip


@pytest.mark.parametrize(("grid", "size"), rest_slow_pairs(GRIDS, GRIDS[:2]), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@both_forms
def test_mixer_equals_the_equations(options, grid, size, form):
    # Ranks around the number of tokens: W_c changes places with W_s where the map is larger.
    for dim, rank, batch in ((8, 3, 2), (6, size[0] * size[1], 1)):
        mixer = form(build_mixer("sbm", dim, grid=grid, rank=rank, **options))
        x = tokens(batch, *size, dim).requires_grad_()
        tensors = dict(mixer.named_parameters())
        split = options.get("x_width", 2) == 2 or options.get("pre_proj", False)
        split = split and options.get("use_linear", True) and options.get("use_bilinear", True)
        mode = options.get("resample", "bicubic")
        expected = reference.sbm(x, tensors, split=split, mode=mode)
        found = mixer(x)
        torch.testing.assert_close(found, expected, **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(mixer(x), expected, **CLOSE)
        gradients = [
            torch.autograd.grad(y.sin().sum(), [x, *tensors.values()]) for y in (found, expected)
        ]
        torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(3, 4), (9, 13), (2, 20), (1, 1), (6, 5)], ids=str)
def test_resampling_equals_the_filters(size, mode):
    read, write = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    new_read, new_write = resample_factors(read, write, size, mode)
    scale = 30 / (size[0] * size[1])
    torch.testing.assert_close(new_read, scale * reference.resized(read, size, mode), **CLOSE)
    torch.testing.assert_close(new_write, reference.resized(write, size, mode), **CLOSE)


FOREIGN = (9, 7)


def test_factors_are_resampled_for_another_grid():
    mixer = build_mixer("sbm", grid=(5, 4), rank=3)
    mixer.bilinear.space_write.requires_grad_(False)
    expected = mixer(tokens(2, *FOREIGN, 8)).detach()
    mixer.set_grid(FOREIGN)
    assert mixer.bilinear.grid == FOREIGN
    assert mixer.bilinear.space_read.shape == (3, *FOREIGN)
    assert mixer.bilinear.space_read.requires_grad
    assert not mixer.bilinear.space_write.requires_grad
    torch.testing.assert_close(mixer(tokens(2, *FOREIGN, 8)), expected, **CLOSE)
    build_mixer("sbm", use_bilinear=False).set_grid(FOREIGN)
    mixer = build_mixer("sbm", grid=(5, 4), rank=3)
    other = build_mixer("sbm", grid=FOREIGN, rank=3, seed=1)
    before = {key: value.clone() for key, value in mixer.state_dict().items()}
    state_dict = mixer.state_dict()
    other.load_state_dict(state_dict)
    x = tokens(2, *FOREIGN, 8)
    torch.testing.assert_close(other(x), mixer(x), **CLOSE)
    assert all(torch.equal(state_dict[key], value) for key, value in before.items())
    assert state_dict.keys() == before.keys()
    with pytest.raises(RuntimeError, match=r"size mismatch for bilinear\.space_read"):
        build_mixer("sbm", grid=FOREIGN, rank=4).load_state_dict(state_dict)
    torch.manual_seed(0)
    bicubic = create_mixer("sbm", 8, grid=(6, 5), rank=4).eval()
    bilinear = create_mixer("sbm", 8, grid=(6, 5), rank=4, resample="bilinear").eval()
    bilinear.load_state_dict(bicubic.state_dict())
    x = tokens(2, 6, 5, 8).float()
    torch.testing.assert_close(bicubic(x), bilinear(x), **EXACT)
    x = tokens(2, 8, 9, 8).float()
    assert not torch.equal(bicubic(x), bilinear(x))
    assert bicubic.bilinear.factors((6, 5))[0] is bicubic.bilinear.space_read
    with pytest.raises(ValueError, match="resample=area is not one of bicubic, bilinear"):
        resample_factors(torch.ones(1, 2, 2), torch.ones(1, 2, 2), (3, 3), "area")


def test_half_precision_product_is_formed_in_float32():
    mixer = build_mixer("sbm", grid=(5, 4), rank=3).half()
    # Behind the norm the result has the precision of the weights.
    mixer._normalise, mixer.gate_proj = lambda star: star, None
    mixer.lin_proj.weight.data *= 1e-4
    mixer.lin_proj.bias.data *= 1e-4
    mixer.bilinear.proj.weight.data *= 1e-2
    mixer.bilinear.proj.bias.data *= 1e-2
    x = tokens(2, 5, 4, 8).half()
    expected = copy.deepcopy(mixer).double()(x.double())
    found = mixer(x)
    assert found.dtype == torch.float32
    assert expected.abs().median() < 6e-5  # smallest normal number of float16
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=2e-8)


@pytest.mark.parametrize(("dim", "grid"), [(64, (56, 56)), (96, (28, 20))], ids=str)
def test_counts_follow_the_closed_form(dim, grid):
    tokens = grid[0] * grid[1]
    with torch.device("meta"):
        mixer = create_mixer("sbm", dim, grid=grid)

    def macs(height, width):
        flat = torch.nn.Conv2d(3, dim, 1, device="meta")  # makes a map of dim channels
        run = count_macs(lambda images: mixer(to_nhwc(flat(images))), (height, width))
        return run - 3 * dim * height * width

    assert count_parameters(mixer) == 5 * dim**2 + 27 * dim + 2 * 64 * tokens
    assert macs(*grid) == tokens * (5 * dim**2 + 18 * dim + 2 * 64 * dim)
    assert macs(2 * grid[0], 2 * grid[1]) == 4 * macs(*grid)
    if dim == 64:
        assert (count_parameters(mixer), macs(*grid)) == (423_616, 93_528_064)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["deit_t", "deit_t_afbo"])
def test_hosts_with_class_tokens_pool_the_map_beside_it(name, dense):
    backbone = meta_backbone(name, token_mixer="sbm", dense=dense)
    assert backbone.pooling == "mean of the map"
    assert "cls_token" not in backbone.state_dict()


def test_initial_scale_is_equal_on_every_map():
    spreads = []
    for side, dim in ((56, 64), (14, 256), (7, 512)):
        torch.manual_seed(0)
        mixer = create_mixer("sbm", dim, grid=(side, side))
        latent = mixer.bilinear.space_read.flatten(1) @ torch.randn(side**2, dim)
        spreads.append((mixer.bilinear.space_write.flatten(1).T @ latent).std().item())
    assert max(spreads) < 1.3 * min(spreads)
    assert 0.7 < min(spreads) < 1.3
