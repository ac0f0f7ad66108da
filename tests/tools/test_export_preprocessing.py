"""Exported networks preprocess images like their run's validation."""

import json
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config

from backbones import create_backbone
from heads.linear import LinearClassifier
from tasks.engine.instantiate import build
from tasks.engine.normalisation import expected_preprocessing, take_preprocessing
from tests.runs import composed, write_run
from tests.small_export import AUGMENTATIONS, run_config
from tools import export
from tools.exports.preprocessing import read_preprocessing


@pytest.fixture(params=AUGMENTATIONS)
def run(request, tmp_path):
    """A run folder, an image, and the image as the run's validation sees it."""
    config = run_config(AUGMENTATIONS[request.param])
    network = LinearClassifier(create_backbone("deit_t", img_size=64), 10)
    state_dict = {f"model.{key}": value for key, value in network.state_dict().items()}
    write_run(tmp_path, config, {"state_dict": state_dict})
    pixels = np.random.default_rng(0).integers(0, 256, (90, 131, 3), dtype=np.uint8)
    picture = tmp_path / "picture.jpg"
    Image.fromarray(pixels).save(picture)
    datamodule = build(config["data"], "data")
    pixels = datamodule.augmentation.eval(64)(Image.open(picture))
    return tmp_path, picture, datamodule.normalise({"image": pixels})["image"]


def run_export(folder, to):
    typed = [f"ckpt={folder}", f"to={to}", f"out={folder / to}", "image_size=64"]
    assert export.main(typed) == 0
    return folder / to


def test_timm_and_mmpretrain_prepare_images_as_the_run_did(run):
    folder, picture, expected = run
    model = timm.create_model(f"local-dir:{run_export(folder, 'timm')}", pretrained=True)
    transform = create_transform(**resolve_data_config(model=model), is_training=False)
    torch.testing.assert_close(transform(Image.open(picture)), expected, rtol=0, atol=1e-6)
    pytest.importorskip("mmpretrain")
    from mmengine import Config
    from mmengine.dataset import Compose
    from mmengine.registry import DefaultScope
    from mmpretrain.registry import MODELS

    folder, picture, expected = run
    out = run_export(folder, "mmpretrain")
    config = Config.fromfile(out / "config.py")
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        preprocessor = MODELS.build({"type": "ClsDataPreprocessor", **config.data_preprocessor})
        sample = Compose(config.test_dataloader.dataset.pipeline)({"img_path": str(picture)})
    sample = {"inputs": [sample["inputs"]], "data_samples": [sample["data_samples"]]}
    found = preprocessor(sample)["inputs"][0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A network of timm with mean and deviation 0.5, and a file of its weights."""
    file = tmp_path_factory.mktemp("other") / "resnet.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), file)
    return create_backbone("timm", model="test_resnet", img_size=64), file


def taken(task, backbone, file, *typed):
    config = composed(f"task={task}", "backbone=timm", "backbone.model=test_resnet", *typed)
    augmentation = getattr(build(config.data, "data", seed=0), "augmentation", None)
    return config, take_preprocessing(config, augmentation, backbone, file)


@pytest.mark.parametrize("task", ["classification", "transfer", "multi_label"])
@pytest.mark.parametrize("paper", [True, False])
def test_training_takes_what_the_weights_expect(task, paper, other):
    typed = ("data=folder", "data.root=.", "data.batch_size=8") if paper else ()
    config, line = taken(task, *other, *typed)
    assert "mean=[0.5,0.5,0.5], std=[0.5,0.5,0.5]" in line
    data = build(config.data, "data", seed=0)
    image = data.normalise({"image": torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)})["image"]
    torch.testing.assert_close(image, torch.ones(1, 3, 2, 2))
    shown = (
        getattr(data.augmentation, "interpolation", None),
        getattr(data.augmentation, "crop_pct", None),
    )
    assert shown == (("bilinear", 0.95) if paper else (None, None))


def test_typed_values_come_before_the_checkpoints_and_these_before_timms(other, tmp_path):
    backbone, file = other
    typed = "++data.augmentation.mean=[0.1,0.2,0.3]"
    augmentation = taken("classification", backbone, file, typed)[0].data["augmentation"]
    assert augmentation["mean"] == [0.1, 0.2, 0.3]
    assert augmentation["std"] == [0.5] * 3
    assert taken("classification", backbone, None)[1] is None  # random weights
    write_run(tmp_path, composed("backbone=deit_t"), {"state_dict": {}})  # an ImageNet run
    assert expected_preprocessing(backbone, tmp_path)[0] == {
        "mean": timm.data.IMAGENET_DEFAULT_MEAN, "std": timm.data.IMAGENET_DEFAULT_STD
    }  # fmt: skip
    hub = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.8}
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({"pretrained_cfg": hub}))
    assert expected_preprocessing(backbone, folder)[0] == hub
    assert read_preprocessing(None, backbone, file, 64).to_timm_config() == {
        "input_size": (3, 64, 64), "crop_pct": 0.95, "crop_mode": "center",
        "interpolation": "bilinear", "mean": (0.5,) * 3, "std": (0.5,) * 3,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gmlp_ti", "mixer_s16", "resnet18", "swin_t", "deit_t"])
def test_hosts_built_by_timm_know_what_its_weights_expect(name):
    with torch.device("meta"):
        expected = create_backbone(name, fast=False).pretrained_cfg
    mean = 0.5 if name in ("gmlp_ti", "mixer_s16") else 0.485
    assert expected["mean"][0] == mean
    assert expected["interpolation"] == ("bilinear" if name == "resnet18" else "bicubic")


def test_preprocessing_follows_the_runs_defaults_only():
    prepared = read_preprocessing(run_config(None))
    assert (prepared.size, prepared.crop_pct, prepared.interpolation) == (64, 1.0, "bicubic")
    assert read_preprocessing(None) is None
    assert read_preprocessing(run_config(None, task="segmentation")) is None


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch_export"])
def test_a_run_goes_out_with_its_preprocessing_and_gives_its_numbers(to, run):
    folder, image, prepared = run
    out = folder / to
    assert export.main([f"ckpt={folder}", f"to={to}", "what=classifier", f"out={out}"]) == 0
    values = json.loads((out / "preprocessing.json").read_text())
    assert values["size"] == [64, 64]  # the run's size, without a typed image_size=
    best = folder / "checkpoints/best.ckpt"
    network = LinearClassifier.from_pretrained("deit_t", best, img_size=64).eval()
    with torch.no_grad():
        shares = network(prepared[None])[0].softmax(0)
    best = shares.argsort(descending=True)[:5]
    command = [sys.executable, out / "infer.py", image]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [f"{shares[k]:.4f}  class {k}" for k in best]
