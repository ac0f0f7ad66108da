"""The contract of a backbone: its maps at any size, its embedding, its parameters."""

import copy
import math
from itertools import cycle, product

import pytest
import torch

from backbones import Backbone, create_backbone
from heads.linear import LinearClassifier
from tests.families import (
    BOTH,
    HOSTS,
    QUICK_NAMES,
    SMALLEST,
    drawn,
    rest_slow,
    rest_slow_pairs,
    short,
    shorten,
)
from tests.tensors import images
from tests.threads import in_threads


def expected_sizes(backbone, size):
    return [
        (info.channels, math.ceil(size[0] / info.stride), math.ceil(size[1] / info.stride))
        for info in backbone.feature_info
    ]


# For each host both, by turns at either size; of the others the default suite takes none.
SIZES = [(False, (65, 93)), (True, (136, 200))]
OTHERS = [(False, (136, 200)), (True, (65, 93))]


@pytest.mark.parametrize(
    ("name", "dense", "size"),
    rest_slow_pairs(
        [(name, *case) for name in BOTH for case in (*SIZES, *OTHERS)],
        [(name, *case) for name, case in zip(QUICK_NAMES, cycle(SIZES), strict=False)],
    ),
    ids=str,
)
def test_maps_have_the_promised_sizes(name, dense, size):
    backbone = short(name, dense=dense).eval()
    strides = [info.stride for info in backbone.feature_info]
    assert strides == [4, 8, 16, 32] or (strides == [16] and not dense)
    with torch.no_grad():
        maps = backbone(images(*size).float())
    assert [tuple(x.shape[1:]) for x in maps] == expected_sizes(backbone, size)
    assert all(x.isfinite().all() for x in maps)


@pytest.mark.parametrize(
    ("host", "dense"),
    rest_slow_pairs(
        list(product(SMALLEST, (False, True))),
        list(zip(SMALLEST, cycle((False, True)), strict=False)),
    ),
)
@torch.no_grad()
def test_no_image_gives_maps_of_none(host, dense):
    backbone = short(host, dense=dense).eval()
    maps = backbone(images(65, 93, batch=0).float())
    assert [tuple(x.shape[1:]) for x in maps] == expected_sizes(backbone, (65, 93))
    assert {len(x) for x in maps} == {0}
    if not dense:
        model = LinearClassifier(backbone, 3).eval()
        assert model(images(64, 64, batch=0).float()).shape == (0, 3)


@pytest.mark.parametrize(
    "dense", [pytest.param(False, marks=pytest.mark.slow), True], ids=["classify", "dense"]
)
@pytest.mark.parametrize("name", rest_slow(BOTH, QUICK_NAMES[1::2]))
@torch.no_grad()
def test_every_map_is_contiguous(name, dense):
    backbone = short(name, dense=dense).eval()
    x = images(65, 93, batch=2).float()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        backbone.to(memory_format=memory_format)
        assert all(m.is_contiguous() for m in backbone(x.contiguous(memory_format=memory_format)))


@pytest.mark.parametrize(
    ("host", "assign"),
    rest_slow_pairs(
        list(product(SMALLEST, (False, True))),
        list(zip(SMALLEST[::2], cycle((False, True)), strict=False)),
    ),
)
def test_what_was_built_on_the_meta_device_loads_and_runs(host, assign):
    built = shorten(create_backbone(host)).eval()
    with torch.device("meta"):
        backbone = shorten(create_backbone(host)).eval()
    if not assign:
        backbone.to_empty(device="cpu")
    backbone.load_state_dict(built.state_dict(), assign=assign)
    with torch.no_grad():
        x = images(64, 96).float()
        torch.testing.assert_close(backbone(x), built(x))


@pytest.mark.parametrize("host", rest_slow(HOSTS, SMALLEST[::3]))
def test_every_host_runs_at_large_odd_sizes(host):
    for dense in (False, True):
        with torch.device("meta"), torch.no_grad():
            backbone = shorten(create_backbone(host, dense=dense))
            maps = backbone(torch.empty(2, 3, 801, 1333))
        assert [tuple(x.shape[1:]) for x in maps] == expected_sizes(backbone, (801, 1333))


@pytest.mark.parametrize("name", rest_slow(BOTH, QUICK_NAMES[1::2]))
def test_no_parameter_is_unused(name):
    model = LinearClassifier(short(name), 3).train()
    dense = short(name, dense=True).train()
    x = images(64, 64, batch=2).float()
    model.loss({"image": x, "label": torch.tensor([0, 2])})["loss_cls"].backward()
    torch.stack([m.square().mean() for m in dense(x)]).sum().backward()
    for module in (model, dense):
        assert [key for key, p in module.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("host", SMALLEST)
def test_embedding_has_the_promised_width(host):
    backbone = short(host)
    assert backbone.embed(images(64, 80, batch=2).float()).shape == (2, backbone.num_features)
    dense = short(host, dense=True)
    with pytest.raises(ValueError, match="build it with dense=False"):
        dense.embed(images(64, 64).float())


@pytest.mark.parametrize("name", rest_slow(BOTH, QUICK_NAMES[::2]))
@torch.no_grad()
def test_memory_format_of_the_images_does_not_matter(name):
    backbone = short(name).double().eval()
    x = images(64, 96, batch=2)
    strided = x.contiguous(memory_format=torch.channels_last)
    for found, expected in zip(backbone(strided), backbone(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("host", SMALLEST)
def test_no_weight_decay_names_exist(host):
    with torch.device("meta"):
        backbone = create_backbone(host)
    names = {name for name, _ in backbone.named_parameters()}
    assert backbone.no_weight_decay <= names
    tables = {name for name in names if name.endswith(("pos_embed", "position_bias_table"))}
    assert tables <= backbone.no_weight_decay


@pytest.mark.parametrize("host", SMALLEST)
def test_has_nothing_that_mmengine_would_call(host):
    assert not hasattr(short(host), "init_weights")
    assert isinstance(short(host), Backbone)


# Each host, alone and with a mixer, and every mixer.
ALL = list(dict.fromkeys([*BOTH, *drawn(0)]))


# That of the default suite remembers matrices for each map size.
@pytest.mark.parametrize("name", rest_slow(ALL, ("posmlp_t",)))
def test_passes_of_several_threads_equal_those_of_one(name, one_thread):
    """One network and two image sizes by turns."""
    backbone = short(name, dense=True).eval()
    inputs = {size: images(*size).float() for size in ((64, 96), (96, 64))}

    @torch.no_grad()
    def maps(size):
        return backbone(inputs[size])

    expected = {size: maps(size) for size in inputs}
    backbone = copy.deepcopy(backbone)  # which has remembered nothing yet
    for size, found in in_threads(maps, inputs):
        for one, other in zip(found, expected[size], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", rest_slow(ALL, ("posmlp_t", "swin_t_afbo")))
@torch.no_grad()
def test_an_image_of_a_batch_has_the_maps_and_the_embedding_that_it_has_alone(name):
    backbone = short(name, dense=True).double().eval()
    x = images(65, 93, batch=3)
    x[0] *= 100
    for together, alone in zip(backbone(x), backbone(x[1:2]), strict=True):
        torch.testing.assert_close(together[1:2], alone, rtol=1e-9, atol=1e-9)
    classifying, x = short(name).double().eval(), x[:, :, :64, :64]
    together, alone = classifying.embed(x)[1:2], classifying.embed(x[1:2])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
