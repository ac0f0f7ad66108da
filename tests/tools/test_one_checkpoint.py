"""A checkpoint is read once, and converted once per network that loads it.

No network is built only to inspect it. The tests count calls of the file readers, of DeiT's
``__init__`` and of ``convert_state_dict``.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from backbones import create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import open_checkpoint
from backbones.checkpoints.seal import seal
from backbones.hosts.deit import DeiT
from heads.linear import LinearClassifier
from tasks import load
from tests.runs import TINY, completed
from tools import export, lipschitz
from tools.exports.networks import build_parts
from tools.exports.requests import TARGETS, ExportRequest

SIZE = {"img_size": 64}


@dataclass
class Counts:
    """Reads per file, conversions per network, and the built networks in order."""

    reads: Counter = field(default_factory=Counter)
    conversions: Counter = field(default_factory=Counter)
    networks: list = field(default_factory=list)

    def check(self, path, *, networks, conversions):
        assert self.reads[path.resolve()] == 1, self.reads
        assert len(self.networks) == networks
        assert self.conversions.total() == conversions
        assert not conversions or max(self.conversions.values()) == 1


@pytest.fixture
def counts(monkeypatch):
    counts = Counts()

    def read(path):
        if isinstance(path, str | Path):
            counts.reads[Path(path).resolve()] += 1

    def convert(network):
        counts.conversions[id(network)] += 1

    # ``networks`` keeps all of them alive, so that every id is unique.
    def counting(owner, name, count):
        function = getattr(owner, name)

        def call(first, *args, **kwargs):
            count(first)
            return function(first, *args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counting(torch, "load", read)
    counting(safetensors.torch, "load_file", read)
    counting(DeiT, "__init__", counts.networks.append)
    counting(DeiT, "convert_state_dict", convert)
    return counts


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


@pytest.mark.usefixtures("sample_cache")
@pytest.mark.parametrize(
    ("mode", "name", "conversions"),
    [("test", "ours.ckpt", 0), ("test", "timm.pth", 1), ("predict", "ours.ckpt", 0)],
)
def test_a_run_loads_a_checkpoint_once(mode, name, conversions, files, counts, tmp_path, capsys):
    typed = ["task=classification", "backbone=deit_t", "backbone.img_size=64", f"mode={mode}",
             f"ckpt={files / name}", "trainer=cpu", f"output_dir={tmp_path}", "data.num_workers=0",
             *TINY["classification"]]  # fmt: skip
    completed(typed, capsys)
    counts.check(files / name, networks=1, conversions=conversions)


@pytest.mark.parametrize("name", ["ours.ckpt", "timm.pth", "timm.safetensors"])
def test_backbone_and_classifier_load_a_checkpoint_once(name, files, counts):
    backbone = create_backbone("deit_t", pretrained=files / name, **SIZE)
    counts.check(files / name, networks=1, conversions=1)
    counts.reads.clear()
    model = LinearClassifier.from_pretrained("deit_t", files / name, **SIZE)
    counts.check(files / name, networks=2, conversions=2)
    assert model.classifier.out_features == 10
    assert torch.equal(model.backbone.pos_embed, backbone.pos_embed)


def test_a_run_folder_is_loaded(trained, counts):
    run = trained("classification").folder()
    load(run)
    # The second one answers the probe of the fingerprint.
    counts.check(run / "checkpoints" / "best.ckpt", networks=2, conversions=0)


# Number of networks, and of those that read a file with other names: the exported one; those
# that timm opens for logits and for maps; those that MMDetection and MMSegmentation initialise.
EXPORTS = {
    "mmdet": (2, 2), "mmseg": (2, 2), "mmpretrain": (2, 1), "timm": (3, 3), "onnx": (1, 1),
    "torch_export": (1, 1),
}  # fmt: skip
GRAPHS = ("onnx", "torch_export")  # slow to record


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=[pytest.mark.slow] * (to in GRAPHS)) for to in EXPORTS]
)
def test_an_export_loads_a_checkpoint_once(to, files, counts, tmp_path):
    typed = ["backbone=deit_t", "backbone.img_size=64", f"to={to}", f"ckpt={files / 'ours.ckpt'}"]
    assert export.main([*typed, "image_size=64", f"out={tmp_path / to}"]) == 0
    networks, conversions = EXPORTS[to]
    counts.check(files / "ours.ckpt", networks=networks, conversions=conversions)
    assert max(counts.reads.values()) <= 2  # the written file, once per model of timm's


@pytest.mark.slow
@pytest.mark.parametrize(("task", "to"), [("detection", "mmdet"), ("segmentation", "mmseg")])
def test_an_export_of_a_whole_model_loads_a_checkpoint_once(task, to, trained, counts, tmp_path):
    run = trained(task).folder()
    for noted in (counts.reads, counts.conversions, counts.networks):
        noted.clear()  # a run reads its own checkpoint at its end
    assert export.main([f"ckpt={run}", f"to={to}", "image_size=64", f"out={tmp_path / to}"]) == 0
    counts.check(run / "checkpoints" / "best.ckpt", networks=2, conversions=0)


@pytest.mark.parametrize("to", GRAPHS)
def test_the_graphs_of_an_export_share_one_network(to, files, counts, tmp_path):
    settings = TARGETS[to].settings
    path = files / "timm.pth"
    parts = build_parts(ExportRequest(to, "deit_t", SIZE, path, None, tmp_path, (64, 64), settings))
    assert parts["classifier"].backbone is parts["maps"].backbone
    counts.check(path, networks=1, conversions=1)


def test_an_export_of_a_backbone_for_dense_prediction_builds_no_other(files, counts, tmp_path):
    path = tmp_path / "dense.pth"
    torch.save(create_backbone("deit_t", dense=True, **SIZE).state_dict(), path)
    counts.networks.clear()
    parts = build_parts(ExportRequest("onnx", "deit_t", SIZE, path, None, tmp_path, (64, 64), {}))
    assert list(parts) == ["dense"]
    counts.check(path, networks=1, conversions=1)


@pytest.mark.slow
def test_bounds_equal_those_of_a_checkpoint(counts, tmp_path):
    path = tmp_path / "affn.pth"
    torch.save(create_backbone("deit_t_affn").state_dict(), path)
    counts.networks.clear()
    typed = ["backbone=deit_t_affn", f"ckpt={path}", "block=blocks.0.*", "iterations=5"]
    assert lipschitz.main(typed) == 0
    counts.check(path, networks=1, conversions=1)


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
