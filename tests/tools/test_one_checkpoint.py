"""A checkpoint is read once, and converted once per network that loads it.

No network is built only to inspect it. The tests count calls of the file readers, of DeiT's
``__init__`` and of ``convert_state_dict``.
"""

import pytest
import safetensors.torch
import timm
import torch

from backbones import create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import open_checkpoint
from backbones.checkpoints.seal import seal
from heads.linear import LinearClassifier

SIZE = {"img_size": 64}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One of our checkpoints from a run, and two of timm's with ten classes."""
    folder = tmp_path_factory.mktemp("files")
    ours = LinearClassifier(create_backbone("deit_t", **SIZE), 10).state_dict()
    theirs = timm.create_model("deit_tiny_patch16_224", num_classes=10, **SIZE).state_dict()
    of_run = {"class_names": [str(digit) for digit in range(10)], "global_step": 7}
    content = {"state_dict": {f"model.{k}": v for k, v in ours.items()}, **of_run}
    torch.save(seal(content), folder / "ours.ckpt")
    torch.save({"state_dict": theirs, "arch": "deit"}, folder / "timm.pth")
    safetensors.torch.save_file(theirs, folder / "timm.safetensors")
    return folder


@pytest.mark.parametrize("name", ["ours.ckpt", "timm.pth", "timm.safetensors"])
def test_one_object_for_every_source(name, files):
    opened = open_checkpoint(files / name)
    ours = name == "ours.ckpt"
    assert opened.path == str(files / name)
    assert opened.is_of_task == ours
    assert opened.container == (() if name.endswith("safetensors") else ("state_dict",))
    assert opened.class_names == (tuple("0123456789") if ours else None)
    assert opened.step == (7 if ours else None)
    assert opened.format == (1 if ours else None)
    assert opened.position is None
    report = adopt(create_backbone("deit_t", **SIZE), opened)
    assert set(report.skipped) == {"classifier.weight", "classifier.bias"}
    assert not report.initialised
