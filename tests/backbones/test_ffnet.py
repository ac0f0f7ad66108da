"""FFNet against its equations, in both forms and under both sets of names."""

import copy
import math

import pytest
import torch
from torch import nn

from backbones import create_backbone
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.ffnet.blocks import VARIANTS, FFNetBlock, Variant
from backbones.hosts.ffnet.checkpoint_conversion import convert_official_state_dict
from backbones.hosts.ffnet.host import FFNet
from backbones.layers.reparam import ConvBN, depthwise, fuse, is_fused
from backbones.mixer import Mixer
from backbones.slots import HostConfig
from tests.errors import refuses
from tests.families import load, load_classifier, meta_backbone, meta_classifier, rest_slow
from tests.references import ffnet as reference
from tests.tensors import images, randomise_network
from tools.papers.published import load_rows

pytestmark = pytest.mark.usefixtures("no_grad")

NAMES = ("ffnet_1", "ffnet_2", "ffnet_3", "ffnet_4", "ffnet_seg")
FORMS = ("train", "fused")
PAIRS = [("train", "train"), ("train", "fused"), ("fused", "fused")]  # what loads into what
EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Small networks with each of the kinds of parts that the five have.
TINY = {
    "tiny_1": {"widths": (4, 8, 16, 32), "depths": (1, 2, 1, 1), "channel": 3},
    "tiny_2": {"widths": (2, 4, 8, 16), "depths": (2, 1, 2, 1)},
    "tiny_3": {"widths": (3, 6, 12, 24), "depths": (1, 1, 2, 1), "scale": True},
    "tiny_seg": {
        "widths": (4, 6, 8, 10), "depths": (1, 1, 2, 1), "token": (3, 3, 9, 9), "channel": 3,
        "expansion": 4, "scale": True, "seg": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny_variants(monkeypatch):
    for name, given in TINY.items():
        spec = reference.USUAL | given
        variant = Variant(
            spec["widths"], spec["depths"], spec["token"], spec["channel"], spec["expansion"],
            1e-6 if spec["scale"] else None, spec["seg"],
        )  # fmt: skip
        monkeypatch.setitem(VARIANTS, name, variant)


def tiny(name, dense=False, drop_path=0.0, form="train"):
    config = HostConfig((64, 64), dense=dense, drop_path_rate=drop_path)
    backbone = FFNet(name, config).double().eval()
    return backbone.fuse() if form == "fused" else backbone


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_has_the_tensors_of_the_authors(name, form):
    model = meta_classifier(name, fused=form == "fused")
    own = {k.removeprefix("backbone."): tuple(v.shape) for k, v in model.state_dict().items()}
    theirs = reference.shapes(reference.SPECS[name], form)
    assert convert_official_state_dict(theirs, name, form) == own


@pytest.mark.parametrize("size", [(64, 64), (75, 110), (64, 97)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TINY)
def test_equals_the_equations(name, form, size):
    tensors = reference.random_tensors(TINY[name], form, classes=5)
    model = load_classifier(tiny(name, form=form), tensors)
    logits, maps = reference.Network(tensors, TINY[name])(images(*size))
    torch.testing.assert_close(model(images(*size)), logits, **EXACT)
    torch.testing.assert_close(model.backbone(images(*size)), maps, **EXACT)


@pytest.mark.parametrize("name", TINY)
@torch.enable_grad()
def test_training_gradients_equal_those_of_the_equations(name):
    tensors = reference.random_tensors(TINY[name], "train", classes=5)
    model = load_classifier(tiny(name), tensors).train()
    theirs = {
        key: value.clone().requires_grad_(value.is_floating_point() and "running" not in key)
        for key, value in tensors.items()
    }
    x = images(70, 64, batch=2).requires_grad_()
    y = images(70, 64, batch=2).requires_grad_()
    model(x).sin().sum().backward()
    reference.Network(theirs, TINY[name], training=True)(y)[0].sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **EXACT)
    expected = {key: value.grad for key, value in theirs.items() if value.requires_grad}
    expected = convert_official_state_dict(expected, name, "train")
    found = {key.removeprefix("backbone."): p.grad for key, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_whole_networks_equal_the_equations(name, form):
    tensors = reference.random_tensors(reference.SPECS[name], form, classes=5)
    backbone = create_backbone(name, fused=form == "fused").double().eval()
    model = load_classifier(backbone, tensors)
    logits, maps = reference.Network(tensors, reference.SPECS[name])(images(64, 70, batch=1))
    torch.testing.assert_close(model(images(64, 70, batch=1)), logits, **EXACT)
    torch.testing.assert_close(model.backbone(images(64, 70, batch=1))[-1], maps[-1], **EXACT)


@pytest.mark.parametrize("dense", [False, True], ids=["classify", "dense"])
@pytest.mark.parametrize("name", TINY)
def test_fused_form_is_the_same_in_float64(name, dense):
    backbone = randomise_network(tiny(name, dense))
    expected = backbone(images(75, 110, batch=2))
    plain = copy.deepcopy(backbone).fuse()
    assert is_fused(plain)
    assert not is_fused(backbone)
    torch.testing.assert_close(plain(images(75, 110, batch=2)), expected, **EXACT)
    assert plain.fuse() is plain
    batch_norms = [m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(batch_norms) == (0 if dense or name == "tiny_seg" else 1)


def test_fusing_keeps_type_and_mode_and_names_variants():
    backbone = tiny("tiny_2")
    backbone.fuse()
    assert {p.dtype for p in backbone.parameters()} == {torch.float64}
    assert not any(module.training for module in backbone.modules())
    assert all(p.requires_grad for p in backbone.parameters())
    half = tiny("tiny_2").bfloat16().train().fuse()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(module.training for module in half.modules())
    message = r"variant must be one of ffnet_1, .*; got 'ffnet_5'"
    refuses(message, convert_official_state_dict, {}, "ffnet_5", "train")
    message = "form must be one of train, fused; got 'plain'"
    refuses(message, convert_official_state_dict, {}, "ffnet_1", "plain")


@pytest.mark.parametrize(("given", "built"), PAIRS)
@pytest.mark.parametrize("name", ["tiny_2", "tiny_seg"])
def test_weights_load_into_their_form_or_the_fused_one(name, given, built):
    trained = randomise_network(tiny(name))
    expected = trained(images(64, 70, batch=2))
    source = trained.fuse() if given == "fused" else trained
    backbone = tiny(name, form=built)
    report = load(backbone, source.state_dict())
    assert not report.initialised
    assert not report.skipped
    assert is_fused(backbone) == (built == "fused")
    torch.testing.assert_close(backbone(images(64, 70, batch=2)), expected, **EXACT)


@pytest.mark.parametrize(("given", "built"), PAIRS)
def test_classification_checkpoints_load_for_dense_prediction(given, built):
    tensors = reference.random_tensors(TINY["tiny_3"], given, classes=5)
    backbone = tiny("tiny_3", dense=True, form=built)
    report = load(backbone, tensors)
    assert {key.split(".")[0] for key in report.initialised} == {f"norm{i}" for i in range(4)}
    assert {key.split(".")[0] for key in report.skipped} == {"norm", "classifier"}


def test_checkpoints_of_the_authors_detectors_load():
    tensors = reference.random_tensors(TINY["tiny_2"], "train")
    tensors = {k: v for k, v in tensors.items() if k.startswith(("patch_embed.", "stages."))}
    for i, width in enumerate(TINY["tiny_2"]["widths"]):
        tensors |= {f"norm{i}.weight": torch.ones(width), f"norm{i}.bias": torch.ones(width)}
    report = load(tiny("tiny_2", dense=True), tensors, "detector")
    assert (report.initialised, report.skipped) == ((), ())


@pytest.mark.parametrize("options", rest_slow([{}, {"token_mixer": "attention"}], [{}]), ids=str)
def test_weights_load_around_swapped_mixers(options):
    tensors = reference.random_tensors(reference.SPECS["ffnet_1"], "train")
    backbone = create_backbone("ffnet_1_glu", **options)
    report = load(backbone, tensors)
    parts = {tuple(key.split(".")[4:6]) for key in report.initialised}
    token = {("token_mixer", "norm"), ("token_mixer", "mixer")} if options else set()
    assert parts == {("channel_mixer", "memory")} | token
    assert len(backbone.mixers()) == 14 * (1 + len(options))
    fused = create_backbone("ffnet_1_glu", fused=True, **options)
    again = load(fused, tensors)
    assert {tuple(key.split(".")[4:6]) for key in again.initialised} == parts
    # The swapped mixers of this file may hold branches too, which only they know how to fold.
    with pytest.raises(ValueError, match=r"differ from a plain ffnet_1: .*then call its fuse\(\)"):
        load(fused, backbone.state_dict())


@pytest.mark.parametrize(("name", "ratio"), [("ffnet_1", 3), ("ffnet_seg", 4)])
def test_channel_mixer_replaces_the_ffn_behind_its_query(name, ratio):
    plain, again = meta_backbone(name), meta_backbone(name, mixer={"drop": 0.1})
    swapped = meta_backbone(f"{name}_afbo")
    # Two square matrices and two biases more or less by block of each width.
    wider = meta_backbone(name, mixer={"hidden_ratio": ratio + 1})
    assert count_parameters(again) == count_parameters(plain)
    blocks = [m for m in plain.modules() if isinstance(m, FFNetBlock)]
    dims = [block.channel_mixer.memory.key.in_channels for block in blocks]
    more = sum(2 * dim * dim + dim for dim in dims)
    assert count_parameters(wider) - count_parameters(plain) == more
    for block in (m for m in swapped.modules() if isinstance(m, FFNetBlock)):
        assert isinstance(block.channel_mixer.memory, Mixer)
        assert block.channel_mixer.query.state_dict()


def test_starts_as_its_authors_say():
    torch.manual_seed(0)
    backbone = create_backbone("ffnet_seg")
    assert backbone.stages[0].blocks[0].token_scale.shape == (96, 1, 1)
    for key, tensor in backbone.state_dict().items():
        if key.endswith("_scale"):
            assert torch.all(tensor == torch.tensor(1e-5))
        elif key.endswith((".conv.weight", "key.weight", "value.weight", "fc.weight")):
            assert 0.0195 < tensor.std() < 0.0205 or tensor.numel() < 5000
        elif key.endswith("bias"):
            assert not tensor.any()


# Published sizes: parameters and multiply-adds of train and fused form, state-dict entries.

SIZES = {
    "ffnet_1": (13_775_656, 13_660_152, 256, 3.001, 2.985, 553, 191),
    "ffnet_2": (27_208_408, 26_908_440, 256, 6.061, 6.003, 1057, 311),
    "ffnet_3": (48_817_896, 48_330_632, 384, 23.029, 22.828, 1593, 513),
    "ffnet_4": (79_868_968, 79_200_360, 384, 43.422, 43.122, 1737, 555),
}


@pytest.mark.parametrize("name", rest_slow(SIZES, ("ffnet_1", "ffnet_2")))
def test_sizes_of_both_forms(name):
    *params, size, train_macs, fused_macs, train_entries, fused_entries = SIZES[name]
    found = []
    for fused in (False, True):
        model = meta_classifier(name, fused=fused)
        macs = round(count_macs(model, size) / 1e9, 3)
        found.append((count_parameters(model), macs, len(model.state_dict())))
    expected = zip(params, (train_macs, fused_macs), (train_entries, fused_entries), strict=True)
    assert found == list(expected)


@pytest.mark.parametrize("name", rest_slow(["ffnet_1", "ffnet_2", "ffnet_4"], ["ffnet_1"]))
def test_plain_architecture_fuses_to_the_same(name):
    plain, fused = meta_backbone(name, branches=False), meta_backbone(name, fused=True)
    assert count_parameters(plain) < count_parameters(meta_backbone(name))
    with torch.device("meta"):
        plain.fuse()
    plain, fused = ({k: v.shape for k, v in m.state_dict().items()} for m in (plain, fused))
    assert plain == fused


def test_rows_of_the_paper_agree():
    own = [row for row in load_rows("ffnet", "classification") if row.backbone in SIZES]
    rows = [row for row in own if "flops" in row.reported]
    assert len(rows) == 8
    for row in rows:
        assert row.options == {"fused": True}
        assert row.reported["flops"] == math.floor(10 * row.macs) / 10
        assert row.reported["params"] == pytest.approx(row.params / 1e6, abs=0.05)
    rows = [row for row in load_rows("ffnet", "segmentation") if row.head == "ffnet_seg"]
    for row, (classes, blocks, expansion) in zip(rows, [(150, 3, 4), (19, 5, 1)], strict=True):
        with torch.device("meta"):
            parts = nn.ModuleList(
                [create_backbone("ffnet_seg", dense=True), decoder(classes, blocks, expansion)]
            )
        assert count_parameters(parts) == row.params
        assert f"{count_parameters(fuse(parts)):,}" in row.note


def decoder(classes, blocks, expansion):
    """The layers with weights in FFNet_seg's decoder: all maps at one width, then blocks."""

    def spatial():
        return depthwise(256, 9, [(1, 9), (9, 1), (5, 5)])

    layers = [ConvBN(1344, 1344), ConvBN(1344, 256)]
    for _ in range(blocks):
        layers += [ConvBN(256, 256), spatial(), spatial(), spatial()]
        layers += [nn.Conv2d(256, 256 * expansion, 1), nn.Conv2d(256 * expansion, 256, 1)]
    return nn.ModuleList([*layers, ConvBN(256, 1024), nn.Conv2d(1024, classes, 1)])
