"""Checkpoints as other tools leave them: each is opened, or what is in the way is named."""

import argparse
import collections
import functools
import json
import os
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch.optim.swa_utils import AveragedModel

from backbones.checkpoints.keys import strip_wrappers
from backbones.checkpoints.opening import open_checkpoint
from tasks.engine.run_folder.saved_runs import checkpoint_file
from tests.errors import refuses


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 1)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))
        self.head = torch.nn.Linear(4, 2)


class Settings:
    def __init__(self, **values):
        self.__dict__.update(values)


class AttrDict(dict):
    pass


OWN = {key: torch.full_like(value, index) for index, (key, value) in
       enumerate(Network().state_dict().items())}  # fmt: skip
BODY = {key: value for key, value in OWN.items() if not key.startswith("head")}
HEAD = {"classifier.weight": OWN["head.weight"], "classifier.bias": OWN["head.bias"]}
ONE = {"weight": torch.ones(3)}


def below(prefix, tensors=OWN):
    return {f"{prefix}.{key}": value for key, value in tensors.items()}


def averaged():
    network = Network()
    network.load_state_dict(OWN)
    return AveragedModel(network).state_dict()


FILES = {
    "timm": {
        "state_dict": OWN, "arch": "deit_tiny",
        "args": argparse.Namespace(lr=0.1, data=pathlib.Path("x")),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "metric": np.float64(1),
    },
    "timm with an average": {
        "state_dict": below("module"), "state_dict_ema": OWN, "args": argparse.Namespace(),
    },
    "AveragedModel": averaged(),
    "AveragedModel beside its model": {
        "state_dict": below("model", below("x")) | below("ema_model", averaged()),
    },
    "compiled": {"state_dict": below("model._orig_mod")},
    "compiled blocks": {
        key.replace("blocks.1.", "blocks.1._orig_mod."): value for key, value in OWN.items()
    },
    "FSDP and recomputation": {
        "model": below("_fsdp_wrapped_module.module._checkpoint_wrapped_module"),
    },
    "Lightning": {
        "state_dict": below("net") | below("criterion", ONE),
        "hyper_parameters": {"optimizer": functools.partial(torch.optim.AdamW, lr=1.0),
                             "loss": torch.nn.CrossEntropyLoss()},
    },
    "Lightning with metrics": {
        "state_dict": below("model.net") | below("loss_fn", ONE) | below("val_acc.tp", ONE),
    },
    "tutorial": {"model_state_dict": OWN, "optimizer_state_dict": {"state": {}}, "epoch": 3},
    "configs": {"weights": OWN, "cfg": OmegaConf.create({"a": [1, {"b": None}]}),
                "more": AttrDict(a=1), "own": Settings(x=1), "ns": SimpleNamespace(y=2)},
    "containers": {"net": OWN, "log": collections.defaultdict(list, {"a": [1]}),
                   "last": collections.deque([1, 2]), "array": np.arange(3)},
    "one unknown entry": {"my_network": OWN, "step": 3},
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_other_tools_give_their_network(name, zipped, tmp_path):
    if not zipped and name in ("configs", "Lightning"):
        pytest.skip("torch's reader of old files refuses such objects, whatever class they have")
    torch.save(FILES[name], tmp_path / "file.pth", _use_new_zipfile_serialization=zipped)
    found = open_checkpoint(tmp_path / "file.pth").state_dict
    found = {key.removeprefix("x."): value for key, value in found.items()}
    assert {key: float(value.mean()) for key, value in found.items()} == {
        key: float(value.mean()) for key, value in OWN.items()
    }


@pytest.mark.parametrize("head", ["head", "fc", "classifier", "linear"])
@pytest.mark.parametrize("wrapper", ["backbone", "encoder", "model.backbone"])
def test_a_classifier_beside_its_backbone_is_kept(wrapper, head):
    outer = wrapper.partition(".")[0] if "." in wrapper else ""
    names = {f"{head}.{part}": OWN[f"head.{part}"] for part in ("weight", "bias")}
    tensors = below(wrapper, BODY) | (below(outer, names) if outer else names)
    tensors |= below("criterion", ONE)
    kept, left_out = strip_wrappers(tensors)
    assert kept.keys() == (BODY | HEAD).keys()
    assert left_out == ["criterion"]


class Act:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (print, "builtins.print in its entry 'x'"),
        (os.mkdir, "posix.mkdir"),
        (os.system, "posix.system"),
        (eval, "builtins.eval in its entry 'x'"),
        (torch.hub.load, "torch.hub.load in its entry 'x'"),
        (np.load, "numpy.load in its entry 'x'"),
        (np.fromfile, "numpy.fromfile|numpy._core|numpy.core"),
    ],
)
def test_functions_are_named_and_never_called(function, named, zipped, tmp_path):
    made = tmp_path / "made"
    content = {"state_dict": OWN, "x": Act(function, str(made))}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=rf"holds more than tensors.*({named}).*could run code"):
        open_checkpoint(tmp_path / "a.pth")
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pth", b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
        ("a.pth", b"<!DOCTYPE html><html>", "a web page"),
        ("a.bin", b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file"),
        ("a.onnx", b"\x08\x08\x12\x07pytorch" + bytes(64), "an ONNX model"),
    ],
)
def test_files_of_another_kind_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    refuses(f"is not a checkpoint but {message}", open_checkpoint, tmp_path / name)


def hub_folder(folder):
    safetensors.torch.save_file(OWN, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "deit_tiny_patch16_224"}')


def sharded(folder):
    parts = [dict(list(OWN.items())[start::2]) for start in (0, 1)]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        safetensors.torch.save_file(part, folder / name)
    where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def hub_cache(folder):
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    for path in (snapshot, blobs, folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    safetensors.torch.save_file(OWN, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(blobs / "0123")


def export_to_mm(folder):
    torch.save({"state_dict": below("backbone"), "meta": {}}, folder / "deit_t.pth")
    safetensors.torch.save_file(below("backbone"), folder / "deit_t.safetensors")
    (folder / "config.py").write_text("model = {}")


def timm_run(folder):
    for name in ("checkpoint-1.pth.tar", "last.pth.tar", "model_best.pth.tar"):
        torch.save({"state_dict": OWN, "args": argparse.Namespace()}, folder / name)


def lightning_logs(folder):
    (folder / "checkpoints").mkdir()
    torch.save({"state_dict": below("net")}, folder / "checkpoints" / "epoch=9-step=100.ckpt")


FOLDERS = [hub_folder, sharded, hub_cache, export_to_mm, timm_run, lightning_logs]


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_folders_of_other_tools_give_their_network(make, tmp_path):
    make(tmp_path)
    for path in (tmp_path, checkpoint_file(tmp_path), checkpoint_file(tmp_path).resolve()):
        assert open_checkpoint(path).state_dict.keys() == OWN.keys()
