"""Backbones as models of timm, and the folders that ``to=timm`` writes."""

import json
import pickle

import pytest
import timm
import torch
from timm.data import create_dataset, resolve_model_data_config
from timm.data.readers.class_map import load_class_map
from timm.optim import create_optimizer_v2

import backbones.timm_models
from backbones import create_backbone, list_backbones, register_mixer
from backbones.mixers.ffn import FFN
from backbones.timm_models import TimmModel, timm_name
from datamodules import LightAugmentation
from heads.linear import LinearClassifier
from tests.families import drawn
from tests.numbered import BACKBONE, TEXT, classifier, save_foreign, save_ours, write_folders
from tools import export
from tools.exports.class_lists import write_class_map

SMALL = "deit_t_afbo"


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def checkpoint(path, name=SMALL, num_classes=10):
    """Write a checkpoint as a training run does, and return it with its network."""
    network = LinearClassifier(create_backbone(name), num_classes).eval()
    torch.save({"state_dict": {f"model.{k}": v for k, v in network.state_dict().items()}}, path)
    return network


# Plain hosts that timm has under the same name.
TIMM_OWN = {
    *("poolformer_s12", "poolformer_s24", "poolformer_s36", "poolformer_m36", "poolformer_m48"),
    *("pvt_v2_b1", "pvt_v2_b2", "pvt_v2_b3", "pvt_v2_b4", "pvt_v2_b5", "resnet18", "resnet50"),
}


def test_timm_lists_every_backbone_and_keeps_its_own():
    names = {timm_name(name): name for name in list_backbones(modality="image")}
    assert set(names) <= set(timm.list_models(module="timm_models"))
    assert names["swin_t_afbo"] == "swin_t_afbo"
    clashing = {entry for entry, name in names.items() if entry != name}
    assert clashing == {f"mixerlab_{name}" for name in list_backbones() if name in TIMM_OWN}
    with torch.device("meta"):
        assert type(timm.create_model("poolformer_s12")).__module__ == "timm.models.metaformer"
        assert timm.create_model("mixerlab_poolformer_s12").backbone.name == "poolformer_s12"
    assert backbones.timm_models.register() == []


def test_mixers_of_a_user_are_registered_on_demand(registering):
    register_mixer("mine", kind="channel", source="this test")(FFN)
    added = backbones.timm_models.register()
    assert "swin_t_mine" in added
    with torch.device("meta"):
        assert timm.create_model("deit_t_mine").backbone.name == "deit_t_mine"


@torch.no_grad()
def test_a_model_is_the_classifier_of_the_tasks(images, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt")
    model = timm.create_model(SMALL, num_classes=10).eval()
    model.load_state_dict(network.state_dict())
    assert torch.equal(model(images), network(images))
    assert model.get_classifier().out_features == 10
    features = model.forward_features(images)
    assert torch.equal(features, network.backbone.embed(images))
    assert torch.equal(model.forward_head(features, pre_logits=True), features)
    assert torch.equal(model.forward_head(features), network(images))


@torch.no_grad()
def test_classifiers_come_and_go(images):
    model = timm.create_model(SMALL, num_classes=0, drop_path_rate=0.1).eval()
    assert model(images).shape == (2, model.num_features)
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    assert model.num_classes == 7
    model.reset_classifier(0, "")
    assert model(images).shape == (2, 192, 4, 6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixerlab_poolformer_s12", "deit_t_afbo", "lvt_r1"])
def test_features_are_the_maps(images, name):
    net = timm.create_model(name, features_only=True).eval()
    backbone = net.model.backbone
    maps = backbone(images)
    for found, expected in zip(net(images), maps, strict=True):
        assert torch.equal(found, expected)
    assert net.feature_info.channels() == [info.channels for info in backbone.feature_info]
    assert net.feature_info.reduction() == [info.stride for info in backbone.feature_info]
    unused = [] if name == "deit_t_afbo" else ["norm"]  # DeiT normalises its map
    assert isinstance(net.model.get_classifier(), torch.nn.Identity)
    assert all(not list(backbone.get_submodule(part).parameters()) for part in unused)


@torch.no_grad()
def test_some_features_of_a_dense_backbone(images):
    net = timm.create_model(SMALL, features_only=True, dense=True, out_indices=(1, -1)).eval()
    assert [tuple(x.shape) for x in net(images)] == [(2, 256, 8, 12), (2, 256, 2, 3)]
    assert net.feature_info.reduction() == [8, 32]


@torch.no_grad()
def test_intermediates_with_and_without_the_features(images):
    model = timm.create_model("mixerlab_poolformer_s12", num_classes=10).eval()
    features, maps = model.forward_intermediates(images, indices=2)
    assert torch.equal(model.forward_head(features), model(images))
    only = model.forward_intermediates(images, indices=[2, 3], intermediates_only=True)
    for found, expected in zip(only, maps, strict=True):
        assert torch.equal(found, expected)


def test_the_input_is_described_as_evaluation_prepares_it():
    with torch.device("meta"):
        model = timm.create_model(SMALL)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 224, 224)
    assert (config["crop_pct"], config["interpolation"]) == (0.9, "bicubic")
    assert config["mean"] == timm.data.IMAGENET_DEFAULT_MEAN
    assert model.default_cfg["classifier"] == "classifier"


def test_decay_of_weights_and_of_layers():
    with torch.device("meta"):
        model = timm.create_model(SMALL, num_classes=10)
    assert model.no_weight_decay() == {"backbone.pos_embed", "backbone.cls_token"}
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()
    groups = create_optimizer_v2(model, opt="adamw", lr=1.0, layer_decay=0.5).param_groups
    assert {group["lr_scale"] for group in groups} == {0.5**i for i in range(14)}
    head = next(g for g in groups if any(p is model.classifier.weight for p in g["params"]))
    assert head["lr_scale"] == 1.0


@pytest.mark.slow
@torch.no_grad()
def test_weights_of_a_file(images, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt")
    file = {"file": str(tmp_path / "last.ckpt"), "num_classes": 10}
    model = timm.create_model(SMALL, pretrained=True, num_classes=10, pretrained_cfg_overlay=file)
    assert torch.equal(model.eval()(images), network(images))
    other = timm.create_model(SMALL, pretrained=True, num_classes=3, pretrained_cfg_overlay=file)
    assert torch.equal(other.eval().forward_features(images), network.backbone.embed(images))
    # A plain host's weights may surround a new mixer, as in create_backbone.
    plain = checkpoint(tmp_path / "plain.pth", "deit_t").backbone
    file["file"] = str(tmp_path / "plain.pth")
    around = timm.create_model(SMALL, pretrained=True, num_classes=10, pretrained_cfg_overlay=file)
    assert torch.equal(around.backbone.pos_embed, plain.pos_embed)


@torch.no_grad()
def test_a_classifier_of_two_layers_is_taken_or_left_as_a_whole(images, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt", "lvt_r1")
    file = {"file": str(tmp_path / "last.ckpt"), "num_classes": 10}
    for classes in (10, 3, 0):
        model = timm.create_model(
            "lvt_r1", pretrained=True, num_classes=classes, pretrained_cfg_overlay=file
        ).eval()
        assert model(images).shape == (2, classes or 256)
        assert torch.equal(model.backbone.embed(images), network.backbone.embed(images))
        assert classes != 10 or torch.equal(model(images), network(images))


class Payload:
    def __reduce__(self):
        return print, ("code ran",)


def test_weights_that_do_not_fit_or_run_code_are_rejected(tmp_path, capsys):
    checkpoint(tmp_path / "last.ckpt", "deit_t_glu")
    file = {"file": str(tmp_path / "last.ckpt"), "num_classes": 10}
    with pytest.raises(ValueError, match=r"last.ckpt does not fit deit_s_glu.*\d+ keys differ"):
        timm.create_model("deit_s_glu", pretrained=True, pretrained_cfg_overlay=file)
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    file["file"] = str(tmp_path / "empty.pth")
    with pytest.raises(ValueError, match=r"empty.pth does not fit deit_t_glu.*\(missing cls_token"):
        timm.create_model("deit_t_glu", pretrained=True, pretrained_cfg_overlay=file)
    with pytest.raises(
        ValueError, match="no pretrained weights of deit_t_glu exist for timm; pass"
    ):
        timm.create_model("deit_t_glu", pretrained=True)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"state_dict": Payload()}))
    file["file"] = str(tmp_path / "evil.pth")
    with pytest.raises(RuntimeError, match="weights_only"):
        timm.create_model("deit_t_glu", pretrained=True, pretrained_cfg_overlay=file)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_chans": 1}, "in_chans of deit_t_afbo must be 3, got 1"),
        ({"global_pool": "avg"}, "has its own pooling, got global_pool='avg'"),
        ({"global_pool": ""}, "pass global_pool='' with num_classes=0"),
        (
            {"clas_token": False},
            "no option of deit_t called 'clas_token'; did you mean class_token",
        ),
        ({"mixer": {"g9": 1}}, "no option of mixer afbo called 'g9'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_impossible_options_are_rejected(options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        timm.create_model(SMALL, **options)


def test_unsupported_requests_are_rejected(images):
    with torch.device("meta"):
        model = timm.create_model(SMALL)
        dense = timm.create_model(SMALL, dense=True)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW', got 'NHWC'"):
        model.forward_intermediates(images, output_fmt="NHWC")
    with pytest.raises(ValueError, match="one norm per map with dense=True only"):
        model.forward_intermediates(images, norm=True)
    with pytest.raises(ValueError, match="build it with dense=False"):
        dense.reset_classifier(10)


# The folders of tools/export.py


@torch.no_grad()
def test_a_folder_opens_in_timm(images, tmp_path):
    network, out = checkpoint(tmp_path / "last.ckpt"), tmp_path / "out"
    arguments = [f"backbone={SMALL}", "to=timm", f"ckpt={tmp_path / 'last.ckpt'}", f"out={out}"]
    assert export.main([*arguments, "image_size=64x96"]) == 0
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert torch.equal(model(images), network(images))
    assert json.loads((out / "config.json").read_text())["architecture"] == SMALL
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        ".mixerlab-export",
    }
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    # The tasks can read it back.
    again = LinearClassifier.from_pretrained(SMALL, out / "model.safetensors").eval()
    assert torch.equal(again(images), network(images))


@pytest.mark.slow
@torch.no_grad()
def test_a_folder_of_a_backbone_for_dense_prediction(images, tmp_path):
    backbone, out = create_backbone(SMALL, dense=True, mixer={"g2": 6}).eval(), tmp_path / "out"
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"state_dict": state | {"roi_head.weight": torch.ones(1)}}, tmp_path / "det.pth")
    arguments = [
        f"backbone={SMALL}",
        "backbone.mixer.g2=6",
        "to=timm",
        f"ckpt={tmp_path / 'det.pth'}",
    ]
    assert export.main([*arguments, f"out={out}", "image_size=64x96"]) == 0
    model = timm.create_model(f"local-dir:{out}", pretrained=True, features_only=True).eval()
    for found, expected in zip(model(images), backbone(images), strict=True):
        assert torch.equal(found, expected)


def test_weights_of_another_model_are_not_exported(tmp_path, capsys):
    checkpoint(tmp_path / "last.ckpt", "deit_s")
    arguments = [f"backbone={SMALL}", "to=timm", f"ckpt={tmp_path / 'last.ckpt'}"]
    assert export.main([*arguments, f"out={tmp_path / 'out'}"]) == 2
    assert "keys differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(0))
@torch.no_grad()
def test_every_host_and_mixer_keep_their_outputs_in_timm(name, images):
    torch.manual_seed(0)
    network = LinearClassifier(create_backbone(name), 10).eval()
    model = timm.create_model(timm_name(name), num_classes=10).eval()
    assert isinstance(model, TimmModel)
    model.load_state_dict(network.state_dict())
    torch.testing.assert_close(model(images), network(images), rtol=1e-5, atol=1e-5)
    net = timm.create_model(timm_name(name), features_only=True).eval()
    kept = net.model.state_dict().keys()
    net.model.load_state_dict({k: v for k, v in network.state_dict().items() if k in kept})
    for found, expected in zip(net(images), network.backbone(images), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_the_mixers_is_rejected(tmp_path, capsys):
    checkpoint(tmp_path / "plain.pth", "deit_t")
    for to in ("timm", "torch_export", "mmdet"):
        typed = [f"backbone={SMALL}", f"ckpt={tmp_path / 'plain.pth'}", f"to={to}"]
        assert export.main([*typed, f"out={tmp_path / to}"]) == 2
        assert (
            f"lacks the weights of the mixers of {SMALL} (blocks.0.mlp, " in capsys.readouterr().err
        )
        assert not (tmp_path / to).exists()
    with pytest.raises(ValueError, match="lacks the weights of the mixers"):
        LinearClassifier.from_pretrained(SMALL, tmp_path / "plain.pth")


def test_labels_of_a_checkpoint_of_ours_go_along(tmp_path):
    network = LinearClassifier(create_backbone(SMALL, img_size=64), 3)
    content = {"state_dict": {f"model.{k}": v for k, v in network.state_dict().items()}}
    names = ["ant", "bee", "cat"]
    torch.save(content | {"class_names": names}, tmp_path / "last.ckpt")
    typed = [
        f"backbone={SMALL}",
        "backbone.img_size=64",
        "to=timm",
        "image_size=64",
        f"out={tmp_path / 'out'}",
    ]
    assert export.main([*typed, f"ckpt={tmp_path / 'last.ckpt'}"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["label_names"] == names
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert list(model.pretrained_cfg["label_names"]) == names


@torch.no_grad()
def test_numbered_folders_score_in_timm(tmp_path):
    """Follows timm's validate.py: its dataset, with the class map that the README names."""
    root, out = write_folders(tmp_path / "data"), tmp_path / "out"
    save_ours(classifier(root, "text"), tmp_path / "last.ckpt", TEXT)
    typed = [f"backbone={BACKBONE}", "backbone.img_size=64", "image_size=64", "to=timm"]
    assert export.main([*typed, f"ckpt={tmp_path / 'last.ckpt'}", f"out={out}"]) == 0
    assert "--class-map <this folder>/class_map.txt" in (out / "README.md").read_text()
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()

    def top1(**options):
        data = create_dataset("", str(root), split="validation", **options)
        data.transform = LightAugmentation().eval(64)
        hits = [int(model(image[None]).argmax()) == label for image, label in data]
        return 100 * sum(hits) / len(hits)

    assert top1() == pytest.approx(100 / 12)
    assert top1(class_map=str(out / "class_map.txt")) == 100


def test_names_that_a_text_cannot_hold_are_in_a_pickled_map(tmp_path):
    names = (" ant", "bee\nwasp", "cat")
    (file,) = write_class_map(tmp_path, names)
    assert load_class_map(str(file)) == {" ant": 0, "bee\nwasp": 1, "cat": 2}


def test_classes_without_names_have_no_map(tmp_path):
    save_foreign(LinearClassifier(create_backbone(SMALL, img_size=64), 3), tmp_path / "timm.pth")
    typed = [f"backbone={SMALL}", "backbone.img_size=64", "to=timm", "image_size=64"]
    out = tmp_path / "out"
    assert export.main([*typed, f"ckpt={tmp_path / 'timm.pth'}", f"out={out}"]) == 0
    assert "does not name its classes" in (out / "README.md").read_text()
    assert not list(out.glob("class_map*"))
