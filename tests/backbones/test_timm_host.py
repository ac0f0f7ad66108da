"""Any model of timm as a host: slots and their geometry, maps, timm's logits, options."""

import copy
import functools
import logging
import math
import pickle
import sys

import pytest
import timm
import torch

from backbones import create_backbone, list_backbones, list_mixers
from backbones.analysis.description import describe_network, unlike_host
from backbones.checkpoints.adoption import adopt, convert
from backbones.checkpoints.earlier_forms import take_earlier_forms
from backbones.checkpoints.opening import in_memory
from backbones.hosts.timm_model import listing
from backbones.hosts.timm_model.placed import Placed
from backbones.registry import find_host, find_mixer, look_up, why_unfit
from heads.linear import LinearClassifier
from tasks.engine.run_folder.earlier_releases import with_earlier_options
from tests.errors import refuses
from tests.tensors import drawn_tensors
from tests.timm_geometry import build_for_geometry, first_slot, seen_changes, spread

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
LISTED = listing.read_list()
SMALLEST = listing.smallest_of_families(LISTED)
CHANNEL = [name for name in SMALLEST.values() if LISTED[name].channel]
TOKEN = [name for name in SMALLEST.values() if LISTED[name].token]
# Models of one layout each: tokens with and without prefix, maps of both orders, windows, others.
QUICK = ("test_vit", "test_convnext", "hiera_tiny_224", "mobilevitv2_050", "davit_tiny")
LARGE = 4e8  # parameters, from which building takes too long and too much memory


def rest_slow(names, quick=QUICK):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
        for kind, names in (("channel", CHANNEL), ("token", TOKEN))
        for name in sorted({*names, *(QUICK if kind == "channel" else ())})
    ],
)
def test_a_changed_block_of_pixels_changes_the_map_of_a_mixer_there_and_nowhere_else(model, kind):
    backbone = build_for_geometry(model, kind)
    found = first_slot(backbone, kind)
    changed, expected = seen_changes(backbone, found)
    # Convolutions before the slot reach a few places further.
    assert not (changed & ~spread(expected, 3)).any(), f"{found.name}: changes elsewhere"
    inside = ~spread(~expected, 1)
    assert changed[inside].all() if inside.any() else changed.any()


def test_the_list_is_that_of_the_installed_timm():
    modules = {name: timm.model_entrypoint(name).__module__ for name in timm.list_models()}
    ours = {name for name, module in modules.items() if not module.startswith("timm.")}
    assert set(LISTED) == modules.keys() - ours


@pytest.mark.parametrize("model", ["test_vit", "test_convnext", "crossvit_tiny_240"])
def test_the_list_is_what_is_found(model):
    assert listing.try_model(model) == LISTED[model]


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(SMALLEST.values()))
def test_a_model_of_each_family_is_as_listed(model):
    stored = LISTED[model]
    assert stored.parameters or stored.error, "type python tools/timm_slots.py write=true"
    if stored.parameters < LARGE:
        assert listing.try_model(model) == stored


def timm_model(name: str, classes: int = 5):
    """A model in float64 with other values in every tensor."""
    config = timm.get_pretrained_cfg(name)
    network = timm.create_model(name, num_classes=classes if config.num_classes else 0)
    drawn = drawn_tensors(network.state_dict())
    network.load_state_dict(drawn)
    return network.double().eval()


@pytest.mark.parametrize("model", rest_slow(SMALLEST.values(), ("test_vit", "test_convnext")))
@torch.no_grad()
def test_logits_are_those_of_timm(model):
    if LISTED[model].parameters > 2e8:
        pytest.skip("too large")
    theirs = timm_model(model)
    backbone = create_backbone("timm", model=model).double()
    converted = convert(in_memory(theirs.state_dict(), "file"), backbone)
    images = torch.randn(1, 3, *LISTED[model].size, dtype=torch.float64)
    if converted.has_classifier:
        ours = LinearClassifier(backbone, 5).double().eval()
        report = adopt(ours, converted)
    else:
        report = adopt(backbone, converted)
        ours = backbone.eval().embed
    assert report.initialised == ()
    expected = theirs(images)
    if theirs.num_classes and not converted.has_classifier:  # one that no linear layer equals
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    torch.testing.assert_close(ours(images), expected, rtol=1e-6, atol=1e-6 * expected.abs().max())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("model", rest_slow(SMALLEST.values(), ("test_vit", "test_convnext")))
@torch.no_grad()
def test_maps_and_embedding_are_as_declared(model, dense):
    if LISTED[model].parameters > 2e8:
        pytest.skip("too large")
    backbone = create_backbone("timm", model=model, dense=dense).eval()
    size = backbone.facts.size if backbone.facts.is_fixed else (134, 170)
    maps = backbone(torch.randn(1, 3, *size))  # its own check compares them with feature_info
    if dense:
        assert [info.stride for info in backbone.feature_info] == [4, 8, 16, 32]
    else:
        assert backbone.embed(torch.randn(1, 3, *size)).shape == (1, backbone.num_features)
    assert all(one.isfinite().all() for one in maps)


def test_mixers_in_both_slots_train_and_reload(tmp_path):
    backbone = create_backbone(
        "timm", model="test_vit", mixer={"name": "afbo"}, token_mixer={"name": "sbm"}, img_size=64
    )
    assert backbone.name == "timm_afbo"
    assert backbone.num_prefix_tokens == 0  # sbm takes none
    backbone.embed(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert all(one.grad is not None for one in backbone.parameters())
    torch.save(backbone.state_dict(), tmp_path / "weights.pth")
    again = create_backbone(**{**backbone.made_by, "pretrained": tmp_path / "weights.pth"})
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again.eval().embed(images), backbone.eval().embed(images))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(backbone)))
    torch.testing.assert_close(copied.embed(images), backbone.embed(images))


def test_weights_of_the_plain_model_load_beside_new_mixers():
    theirs = timm_model("test_vit", 3)
    backbone = create_backbone("timm_afbo", model="test_vit").double()
    report = adopt(backbone, in_memory(theirs.state_dict(), "file"))
    assert all(".mixer." in key for key in report.initialised)
    assert any("mlp" in key for key in report.skipped)
    own = backbone.state_dict()["network.blocks.0.attn.qkv.weight"]
    assert torch.equal(own, theirs.state_dict()["blocks.0.attn.qkv.weight"])


def _trials() -> list:
    """Every mixer once, and every family once with each kind, drawn by turns.

    Families of large images have one image and a cheap one: KANs of 896 x 896 take 17 GB. So does
    ConvMixer, of 32 blocks at a full map: bi_wkv takes 10 GB there.
    """
    host, cases = find_host("timm"), []
    for kind, names, cheap in (("channel", CHANNEL, "glu"), ("token", TOKEN, "pooling")):
        models = [
            name
            for name in names
            if max(LISTED[name].size) <= 512 and not name.startswith("convmixer")
        ]
        cases += [(name, kind, cheap) for name in names if name not in models]
        mixers = [
            name
            for name in list_mixers(kind)
            if name != "ffn" and not why_unfit(host, find_mixer(name))
        ]
        for turn in range(max(len(mixers), len(models))):
            cases.append((models[turn % len(models)], kind, mixers[turn % len(mixers)]))
    return cases


# Their blocks lack a norm before the slot, and products of channels grow beyond float32.
WITHOUT_NORMS = ("repvit_m1", "shvit_s1")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind", "mixer"), _trials())
def test_each_family_and_each_mixer_trains(model, kind, mixer):
    if LISTED[model].parameters > 1e8:
        pytest.skip("too large")
    options = {"mixer": {"name": mixer}} if kind == "channel" else {"token_mixer": mixer}
    try:
        backbone = create_backbone("timm", model=model, partial=True, **options)
    except ValueError as refused:
        if "class token" in str(refused) or "refuses" in str(refused):
            pytest.skip(str(refused))
        raise
    if model in WITHOUT_NORMS:
        backbone.double()
    size = backbone.facts.size
    images = torch.randn(2 if max(size) <= 512 else 1, 3, *size).to(next(backbone.parameters()))
    backbone.embed(images).square().sum().backward()
    for name, mixer_ in backbone.mixers().items():
        grads = [one.grad for one in mixer_.parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in grads), name


@pytest.mark.parametrize(
    "model", ["test_vit", "swin_tiny_patch4_window7_224", "hiera_tiny_224", "mobilevit_xxs"]
)
@torch.no_grad()
def test_layouts_are_inverted(model):
    backbone = create_backbone("timm", model=model, img_size=64 if "hiera" not in model else None)
    for one in {
        (o.kind, type(o.layout), o.layout.place.stride): o for o in backbone.slots.places
    }.values():
        layout, prefix = one.layout, one.layout.prefix
        given = next(iter(backbone.facts.calls[one.name])).input_shape
        if one.method:
            continue
        x = torch.randn(given)
        folded, tokens = layout.fold(x)
        assert tuple(folded.shape[1:3]) == layout.place.size
        assert (tokens is None) == (prefix == 0)
        torch.testing.assert_close(layout.unfold(folded, tokens, x), x)


def test_layers_are_those_of_timm():
    from timm.optim import param_groups_layer_decay

    theirs = timm.create_model("test_vit")
    groups = param_groups_layer_decay(theirs, layer_decay=0.5)
    scales = {id(one): group["lr_scale"] for group in groups for one in group["params"]}
    expected = {name: scales[id(one)] for name, one in theirs.named_parameters()}
    backbone = create_backbone("timm", model="test_vit")
    last = backbone.num_layers - 1
    for name, _ in backbone.named_parameters():
        scale = 0.5 ** (last - backbone.layer_id(name))
        assert math.isclose(scale, expected[name.removeprefix("network.")]), name


def test_a_placed_mixer_gets_oblong_maps():
    backbone = create_backbone("timm_afbo", model="test_vit", img_size=64).eval()
    seen = []
    placed = next(one for one in backbone.modules() if isinstance(one, Placed))
    placed.mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1:3]))
    backbone(torch.zeros(1, 3, 64, 96))
    backbone(torch.zeros(1, 3, 96, 64))
    assert seen == [(4, 6), (6, 4)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "vit_smal_patch16_224"}, "did you mean vit_small_patch16_224"),
        ({"model": "resnet18", "mixer": "afbo"}, "no feed-forward network"),
        ({"model": "test_vit", "options": {"window_size": 7}}, "timm refuses test_vit"),
        ({"model": "levit_128s", "img_size": 128}, "224x224 pixels only"),
        ({"mixer": "afbo", "name": "timm_iffn"}, "timm_iffn already has iffn"),
    ],
)
def test_errors_name_the_remedy(options, said):
    refuses(said, create_backbone, **{"name": "timm", **options})


# All named hosts that timm has, and their models there. Swin pads before it rolls, as its authors
# do; the size has no padding.
LETTERS = {"t": "tiny", "s": "small", "b": "base"}
NAMED = {
    **{f"deit_{k}": f"deit_{v}_patch16_224" for k, v in LETTERS.items()},
    **{f"swin_{k}": f"swin_{v}_patch4_window7_224" for k, v in LETTERS.items()},
    **{f"gcvit_{k}": f"gcvit_{k}iny" for k in ("xxt", "xt", "t")},
    **{f"gmlp_{k}": f"gmlp_{k}16_224" for k in ("ti", "s", "b")},
    **{f"mixer_{k}16": f"mixer_{k}16_224" for k in "sb"},
    **{name: name for name in ("resnet18", "resnet50")},
    **{f"pvt_v2_b{k}": f"pvt_v2_b{k}" for k in range(1, 6)},
    **{f"poolformer_{k}": f"poolformer_{k}" for k in ("s12", "s24", "s36", "m36", "m48")},
    "convnext_t": "convnext_tiny",
}  # fmt: skip
# PoolFormer's authors normalise the last map and then pool it, with another epsilon than timm.
OWN_HEAD = ("poolformer",)


@pytest.mark.parametrize(
    ("host", "model"),
    [
        pytest.param(*pair, marks=() if pair[0] == "resnet18" else pytest.mark.slow)
        for pair in NAMED.items()
    ],
)
@torch.no_grad()
def test_a_named_host_is_the_same_network(host, model):
    theirs = timm.create_model(model, num_classes=0)
    tensors = drawn_tensors(theirs.state_dict())
    theirs.load_state_dict(tensors)
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    outputs = []
    for name, options in ((host, {}), ("timm", {"model": model})):
        backbone = create_backbone(name, **options).double()
        adopt(backbone, in_memory(theirs.double().state_dict(), "file"))
        backbone.eval()
        has_own_head = host.startswith(OWN_HEAD)
        outputs.append(backbone(images)[-1] if has_own_head else backbone.embed(images))
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-8)


def test_the_pairs_are_all_named_hosts_of_timm():
    """A host that is built by timm's code names one of its models."""
    built = {
        name
        for name in list_backbones(modality="image")
        if look_up(name)[1] is None
        and name != "timm"
        and "create_timm_model" in vars(sys.modules[look_up(name)[0].build.__module__])
    }
    assert built <= NAMED.keys()


def test_a_model_with_mixers_is_one_of_timm_again():
    import backbones.timm_models  # noqa: F401 - registers it

    model = timm.create_model("timm_afbo", model="test_vit", img_size=64, in_chans=4, num_classes=3)
    take_earlier_forms(model.backbone, model.backbone.state_dict())
    assert model.eval()(torch.zeros(1, 4, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(
    ("model", "kind", "name", "share"),
    [
        ("efficientnet_b1", "token_mixer", "sep_conv", "1 of 23 token mixers"),
        slow("rdnet_tiny", "mixer", "glu", "1 of 6 feed-forward networks"),
        slow("hiera_tiny_224", "token_mixer", "attention", "9 of 12 token mixers"),
        slow("test_convnext", "token_mixer", "sep_conv", ""),
    ],
)
def test_a_mixer_in_less_than_half_of_the_places_asks_for_a_word(model, kind, name, share, caplog):
    caplog.set_level(logging.INFO)
    options = {"name": "timm", "model": model, kind: {"name": name}}
    with torch.device("meta"):
        if share.startswith("1 "):
            refuses(f"{share} .*backbone.partial=true", create_backbone, **options)
            options["partial"] = True
        backbone = create_backbone(**options)
    assert describe_network(backbone).get("replaced", "") == share
    assert bool(share) == (f"a mixer replaces {share} of {model}" in caplog.messages)
    assert not [line for line in caplog.messages if "class token" in line]  # none has one
    assert unlike_host(backbone) is None


def test_earlier_runs_of_a_partial_host_open():
    old = {"backbone": {"name": "timm_glu", "model": "rdnet_tiny", "mixer": {}}}
    assert with_earlier_options(old)["backbone"]["partial"] is True
    typed = {"backbone": {**old["backbone"], "partial": False}}
    assert with_earlier_options(typed)["backbone"]["partial"] is False
