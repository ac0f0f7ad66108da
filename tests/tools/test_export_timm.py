"""Backbones as models of timm, and the folders that ``to=timm`` writes."""

import json
import subprocess
import sys

import pytest
import timm
import torch
from timm.data import create_dataset, resolve_model_data_config
from timm.optim import create_optimizer_v2

import backbones.timm_models
import tasks
from backbones import create_backbone, list_backbones, register_mixer
from backbones.mixers.ffn import FFN
from backbones.registry import look_up
from backbones.timm_models import TimmModel, timm_name
from heads.linear import LinearClassifier
from tests.families import drawn, rest_slow
from tests.numbered import (
    BACKBONE,
    TEXT,
    classifier,
    prepared,
    save_ours,
    write_folders,
)
from tools import export

SMALL = "deit_t_afbo"


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def checkpoint(path, name=SMALL, num_classes=10, **options):
    """Write a checkpoint as a training run does, and return it with its network."""
    network = LinearClassifier(create_backbone(name, **options), num_classes).eval()
    torch.save({"state_dict": {f"model.{k}": v for k, v in network.state_dict().items()}}, path)
    return network


def from_file(path, name=SMALL, num_classes=10):
    """Create a model of timm with the weights of a file of ten classes."""
    file = {"file": str(path), "num_classes": 10}
    options = {"num_classes": num_classes, "pretrained_cfg_overlay": file}
    return timm.create_model(name, pretrained=True, **options).eval()


def run_export(folder, name, *typed, to="timm", status=0):
    """Export a checkpoint; return the folder."""
    words = [f"backbone={SMALL}", f"to={to}", f"ckpt={folder / name}", f"out={folder / 'out'}"]
    assert export.main([*words, *typed]) == status
    return folder / "out"


def opened(folder, **options):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


# Plain hosts that timm has under the same name.
TIMM_OWN = {f"poolformer_{size}" for size in ("s12", "s24", "s36", "m36", "m48")}
TIMM_OWN |= {*(f"pvt_v2_b{size}" for size in range(1, 6)), "resnet18", "resnet50"}


def test_timm_lists_every_backbone_and_those_of_a_user(registering):
    ours = [one for one in list_backbones(modality="image") if look_up(one)[0].name != "timm"]
    names = {timm_name(name): name for name in ours}
    assert set(names) <= set(timm.list_models(module="timm_models"))
    assert names["swin_t_afbo"] == "swin_t_afbo"
    clashing = {entry for entry, name in names.items() if entry != name}
    assert clashing == {f"mixerlab_{name}" for name in list_backbones() if name in TIMM_OWN}
    with torch.device("meta"):
        assert type(timm.create_model("poolformer_s12")).__module__ == "timm.models.metaformer"
        assert timm.create_model("mixerlab_poolformer_s12").backbone.name == "poolformer_s12"
    assert backbones.timm_models.register() == []
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
    torch.testing.assert_close(tuple(net(images)), maps, rtol=0, atol=0)
    assert net.feature_info.channels() == [info.channels for info in backbone.feature_info]
    assert net.feature_info.reduction() == [info.stride for info in backbone.feature_info]
    unused = [] if name == "deit_t_afbo" else ["norm"]  # DeiT normalises its map
    assert isinstance(net.model.get_classifier(), torch.nn.Identity)
    assert all(not list(backbone.get_submodule(part).parameters()) for part in unused)


def test_the_input_and_the_decay_of_weights_and_layers():
    with torch.device("meta"):
        model = timm.create_model(SMALL, num_classes=10)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 224, 224)
    assert (config["crop_pct"], config["interpolation"]) == (0.9, "bicubic")
    assert config["mean"] == timm.data.IMAGENET_DEFAULT_MEAN
    assert model.default_cfg["classifier"] == "classifier"
    assert model.no_weight_decay() == {"backbone.pos_embed", "backbone.cls_token"}
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()
    groups = create_optimizer_v2(model, opt="adamw", lr=1.0, layer_decay=0.5).param_groups
    assert {group["lr_scale"] for group in groups} == {0.5**i for i in range(14)}
    head = next(g for g in groups if any(p is model.classifier.weight for p in g["params"]))
    assert head["lr_scale"] == 1.0


@torch.no_grad()
@pytest.mark.parametrize("name", rest_slow((SMALL, "lvt_r1"), ["lvt_r1"]))  # of one or two layers
def test_a_classifier_is_taken_or_left_as_a_whole(name, images, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt", name)
    for classes in (10, 3, 0):
        model = from_file(tmp_path / "last.ckpt", name, classes)
        assert model(images).shape == (2, classes or network.backbone.num_features)
        assert torch.equal(model.backbone.embed(images), network.backbone.embed(images))
        assert classes != 10 or torch.equal(model(images), network(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_pool": "avg"}, "deit_t keeps its pooling; .*resnet18, resnet50"),
        ({"global_pool": ""}, "pass global_pool='' with num_classes=0"),
        ({"clas_token": False}, "of deit_t called 'clas_token'; did you mean class_token"),
        ({"mixer": {"g9": 1}}, "no option of mixer afbo called 'g9'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_impossible_options_are_rejected(options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        timm.create_model(SMALL, **options)


@torch.no_grad()
def test_a_folder_opens_in_timm(images, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt")
    out = run_export(tmp_path, "last.ckpt", "image_size=64x96")
    assert torch.equal(opened(out)(images), network(images))
    assert json.loads((out / "config.json").read_text())["architecture"] == SMALL
    names = {"config.json", "model.safetensors", "README.md", ".mixerlab-export"}
    assert {path.name for path in out.iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    # The tasks can read it back.
    again = LinearClassifier.from_pretrained(SMALL, out / "model.safetensors").eval()
    assert torch.equal(again(images), network(images))


@torch.no_grad()
@pytest.mark.parametrize("model", rest_slow(("resnet18", "mobilenetv3_small_050"), ["resnet18"]))
def test_a_model_of_timm_leaves_as_timm_s_own(model, tmp_path):
    network = checkpoint(tmp_path / "last.ckpt", "timm", model=model)
    out = run_export(
        tmp_path, "last.ckpt", "backbone=timm", f"backbone.model={model}", "image_size=64"
    )
    images = torch.randn(2, 3, 64, 64)
    torch.save(images, tmp_path / "images.pt")
    code = (
        "import sys, timm, torch\n"
        f"images = torch.load({str(tmp_path / 'images.pt')!r})\n"
        f"model = timm.create_model('local-dir:{out}', pretrained=True).eval()\n"
        "assert 'backbones' not in sys.modules\n"
        f"torch.save(model(images), {str(tmp_path / 'logits.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), network(images))
    assert "backbones" not in (out / "README.md").read_text()


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
    expected = tuple(network.backbone(images))
    torch.testing.assert_close(tuple(net(images)), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_numbered_folders_score_in_timm(tmp_path):
    """Follows timm's validate.py: its dataset, with the class map that the README names."""
    root = write_folders(tmp_path / "data")
    save_ours(classifier(root, "text"), tmp_path / "last.ckpt", TEXT)
    typed = [f"backbone={BACKBONE}", "backbone.img_size=64", "image_size=64"]
    out = run_export(tmp_path, "last.ckpt", *typed)
    assert "--class-map <this folder>/class_map.txt" in (out / "README.md").read_text()
    model = opened(out)

    def top1(**options):
        data = create_dataset("", str(root), split="validation", **options)
        data.transform = prepared
        hits = [int(model(image[None]).argmax()) == label for image, label in data]
        return 100 * sum(hits) / len(hits)

    assert top1() == pytest.approx(100 / 12)
    assert top1(class_map=str(out / "class_map.txt")) == 100


def test_a_loaded_task_exports_itself_from_any_folder(trained, tmp_path, monkeypatch):
    task = tasks.load(trained("classification").folder().resolve())
    (tmp_path / "tools.py").write_text("raise ImportError('another package')")
    monkeypatch.chdir(tmp_path)
    files = task.export("timm", out=tmp_path / "out", overwrite=False)
    assert {path.parent for path in files} == {tmp_path / "out"}
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(opened(tmp_path / "out")(images), task.model.predict({"image": images}))
    with pytest.raises(ValueError, match="exists; pass overwrite=true"):
        task.export("timm", out=tmp_path / "out")
    with torch.no_grad():
        task.model.classifier.weight += 1
    with pytest.raises(ValueError, match=r"classifier\.weight differs from .*, which export\(\)"):
        task.export("timm", out=tmp_path / "other")
    with pytest.raises(ValueError, match=r"a task from tasks\.load"):
        tasks.ClassificationTask(task.model, [str(n) for n in range(10)]).export("timm")
