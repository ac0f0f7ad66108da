"""The contract of a backbone: its maps at any size, its embedding, its parameters."""

import copy
import itertools
import math
from itertools import cycle, product

import pytest
import torch

from backbones import Backbone, create_backbone, list_mixers
from backbones.analysis.patch_reach import reached_patches
from backbones.registry import find_host, look_up
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import (
    BOTH,
    HOSTS,
    NAMES,
    QUICK_NAMES,
    SMALLEST,
    build_short,
    drawn,
    meta_backbone,
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
def test_an_empty_batch_gives_empty_maps(host, dense):
    backbone = short(host, dense=dense).eval()
    maps = backbone(images(65, 93, batch=0).float())
    assert [tuple(x.shape[1:]) for x in maps] == expected_sizes(backbone, (65, 93))
    assert {len(x) for x in maps} == {0}
    if not dense:
        model = LinearClassifier(backbone, 3).eval()
        assert model(images(64, 64, batch=0).float()).shape == (0, 3)


@pytest.mark.parametrize(
    ("host", "assign"),
    rest_slow_pairs(
        list(product(SMALLEST, (False, True))),
        list(zip(SMALLEST[::2], cycle((False, True)), strict=False)),
    ),
)
def test_networks_of_the_meta_device_load_and_run(host, assign):
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


@pytest.mark.parametrize(
    ("name", "options"),
    rest_slow_pairs(
        [*((name, {}) for name in BOTH), ("ffnet_seg", {}), ("sbm_t", {"pos": "ape"})],
        [*((name, {}) for name in QUICK_NAMES[1::3]), ("ffnet_seg", {})],
    ),
    ids=str,
)
def test_training_in_bfloat16_reaches_every_parameter(name, options):
    model = LinearClassifier(build_short(name, drop_path_rate=0.1, **options), 3).train()
    dense = build_short(name, dense=True, **options).train()
    x = images(64, 96, batch=2).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss({"image": x, "label": torch.tensor([0, 2])})["loss_cls"]
        loss = loss + torch.stack([m.float().square().mean() for m in dense(x)]).sum()
    loss.backward()
    for module in (model, dense):
        gradients = {key: p.grad for key, p in module.named_parameters()}
        assert [k for k, g in gradients.items() if g is None or not g.isfinite().all()] == []


@pytest.mark.parametrize("host", SMALLEST)
def test_embeddings_and_names_of_parameters(host):
    backbone = short(host)
    assert backbone.embed(images(64, 80, batch=2).float()).shape == (2, backbone.num_features)
    dense = short(host, dense=True)
    refuses("build it with dense=False", dense.embed, images(64, 64).float())
    backbone = meta_backbone(host)
    names = {name for name, _ in backbone.named_parameters()}
    assert backbone.no_weight_decay <= names
    tables = {name for name in names if name.endswith(("pos_embed", "position_bias_table"))}
    assert tables <= backbone.no_weight_decay
    assert not hasattr(short(host), "init_weights")
    assert isinstance(short(host), Backbone)


@pytest.mark.parametrize("name", rest_slow(BOTH, QUICK_NAMES[::2]))
@torch.no_grad()
def test_maps_are_equal_in_every_memory_format(name):
    backbone = short(name).double().eval()
    x = images(64, 96, batch=2)
    strided = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(backbone(strided), backbone(x), rtol=1e-9, atol=1e-9)


# Each host, alone and with a mixer, and every mixer.
ALL = list(dict.fromkeys([*BOTH, *drawn(0)]))


# That of the default suite remembers matrices for each map size.
@pytest.mark.parametrize("name", rest_slow(ALL, ("posmlp_t",)))
def test_passes_of_several_threads_equal_those_of_one(name, one_thread):
    backbone = short(name, dense=True).eval()
    inputs = {size: images(*size).float() for size in ((64, 96), (96, 64))}

    @torch.no_grad()
    def maps(size):
        return backbone(inputs[size])

    expected = {size: maps(size) for size in inputs}
    backbone = copy.deepcopy(backbone)  # which has remembered nothing yet
    for size, found in in_threads(maps, inputs):
        for one, other in zip(found, expected[size], strict=True):
            # Products without norms, a newcomer's, may overflow.
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", rest_slow(ALL, ("posmlp_t", "swin_t_afbo")))
@torch.no_grad()
def test_an_image_of_a_batch_has_the_maps_and_the_embedding_that_it_has_alone(name):
    backbone = short(name, dense=True).double().eval()
    x = images(65, 93, batch=3)
    x[0] *= 100
    for together, alone in zip(backbone(x), backbone(x[1:2]), strict=True):
        torch.testing.assert_close(together[1:2], alone, rtol=1e-7, atol=1e-7)
    classifying, x = short(name).double().eval(), x[:, :, :64, :64]
    together, alone = classifying.embed(x)[1:2], classifying.embed(x[1:2])
    torch.testing.assert_close(together, alone, rtol=1e-7, atol=1e-7)


# Sums of the plain hosts' weights at seed 0, as of commit 2132bf5.
STARTS = {
    "convnext_t": 8177.9099, "cyclemlp_b1": 5802.0479, "deit_t": 4773.2252,
    "edgevit_xxs": 6033.4851, "ffnet_1": 56247.7464, "gcvit_xxt": 7887.7338, "gmlp_ti": 21424.4480,
    "hiremlp_t": 19099.3600, "lvt_r1": 4451.1787, "mixer_s16": 8734.1803,
    "poolformer_s12": 7177.5902, "posmlp_t": 12971.9263, "pvt_v2_b1": 6926.4921,
    "resnet18": 7589.4771, "sbm_t": 15498.5613, "swin_t": 12382.5187, "visionllama_s": 12855.6100,
}  # fmt: skip


def host_weights(name, **options):
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, **options)
    slots = tuple(backbone.mixers())
    tensors = backbone.state_dict().items()
    return {key: value for key, value in tensors if not (slots and key.startswith(slots))}


@pytest.mark.parametrize("host", STARTS)
def test_a_host_starts_from_the_weights_of_earlier_releases_with_and_without_mixers(host):
    plain, slots = host_weights(host), find_host(host).slots
    total = sum(w.double().sum().item() for w in plain.values() if w.is_floating_point())
    assert total == pytest.approx(STARTS[host], abs=0.01)
    if not slots:
        return
    name = f"{host}_afbo" if "channel" in slots else host
    weights = host_weights(name, token_mixer="attention" if "token" in slots else None)
    shared = weights.keys() & plain.keys()
    assert shared
    assert [key for key in shared if not torch.equal(weights[key], plain[key])] == []


TOKEN_MIXERS = list_mixers("token")
TOKEN_HOSTS = [host for host in HOSTS if "token" in find_host(host).slots]
# DeiT has a class token.
QUICK_PAIRS = [("deit_t", mixer) for mixer in TOKEN_MIXERS[::2]]
# By turns; the first host of each file with more mixers than others, which differ in size only.
DRAWN = drawn(0)
REACH_NAMES = [
    name
    for turn, name in enumerate(NAMES)
    if name in DRAWN or (look_up(name)[0].name in SMALLEST and turn % 9 == 0)
]
REACH_PAIRS = [
    (host, mixer)
    for host, mixer in itertools.product(TOKEN_HOSTS, TOKEN_MIXERS)
    if (host, mixer) in QUICK_PAIRS
    or (TOKEN_HOSTS.index(host) + TOKEN_MIXERS.index(mixer)) % (4 if host in SMALLEST else 45) == 0
]
REACH_QUICK = [name for name in DRAWN if look_up(name)[0].name in SMALLEST]
# Where a mixer's own groups do not divide the host's channels.
FITTING = {("ffnet_2", mixer): {"groups": 4} for mixer in ("ggqpe", "glrpe")}
REACH_SIZE = (64, 96)


def assert_sees_every_patch(network):
    network.double().eval()
    reached = reached_patches(network, images(*REACH_SIZE), network.feature_info[0].stride)
    assert reached.all(), f"{(~reached).sum()} of {reached.numel()} patches are not reached"


@pytest.mark.parametrize("name", rest_slow(REACH_NAMES, REACH_QUICK))
def test_every_host_sees_every_patch_with_every_mixer(name):
    assert_sees_every_patch(build_short(name, img_size=REACH_SIZE))


@pytest.mark.parametrize(("host", "mixer"), rest_slow_pairs(REACH_PAIRS, QUICK_PAIRS))
def test_every_host_sees_every_patch_with_every_token_mixer(host, mixer):
    options = {"name": mixer, **FITTING.get((host, mixer), {})}
    assert_sees_every_patch(build_short(host, token_mixer=options, img_size=REACH_SIZE))
