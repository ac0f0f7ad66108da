"""Exported networks preprocess images like their run's validation."""

import json
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from backbones import create_backbone
from heads.linear import LinearClassifier
from tasks.engine.instantiate import build
from tests.runs import write_run
from tests.small_export import AUGMENTATIONS, run_config
from tools import export
from tools.exports.preprocessing import Preprocessing, read_preprocessing


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
    datamodule = build(config, "data")
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


@pytest.mark.parametrize("squash", [False, True])
def test_mmpretrain_resizes_as_the_run_did(squash):
    pytest.importorskip("mmpretrain")
    from tools.exports.mm_configs import dataset_config

    prepared = Preprocessing(48, 0.75, squash, "bilinear", (0.5,) * 3, (0.2,) * 3)
    config = dataset_config("mmpretrain", None, prepared=prepared)
    steps = config["test_dataloader"]["dataset"]["pipeline"]
    resize = next(step for step in steps if step["type"].startswith("Resize"))
    given = {"backend": "pillow", "interpolation": "bilinear"}
    if squash:
        assert resize == {"type": "Resize", "scale": (64, 64), **given}
    else:
        assert resize == {"type": "ResizeEdge", "edge": "short", "scale": 64, **given}
    assert next(step for step in steps if step["type"] == "CenterCrop")["crop_size"] == 48


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
