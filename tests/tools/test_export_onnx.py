"""Backbones as ONNX models and torch.export programs: sizes, errors, outputs."""

import dataclasses
import errno
import importlib
import json
from itertools import cycle

import onnxruntime
import pytest
import torch
from torch import nn

from backbones import create_backbone, list_mixers
from heads.linear import LinearClassifier
from tests.families import SMALLEST, shorten
from tests.numbered import CLASSES, NATURAL, save_ours
from tests.small_export import mixer_request, small_request
from tools import export
from tools.exports import tracing
from tools.exports.networks import build_export_network
from tools.exports.requests import ExportRequest, exporter

# Python code cuts their windows by counting, or their tables have one size (timm's ViT).
FIXED = ("gmlp", "mixer", "posmlp", "timm")


def export_small(name, to, folder, **settings):
    """Export a small network; return the README's sentence on sizes, by file."""
    files = exporter(to)(small_request(name, to, folder, **settings))
    assert {path.name for path in files} == {path.name for path in folder.iterdir()}
    lines = (folder / "README.md").read_text().splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("* ")}


def check_sizes(name, sizes):
    for line in sizes.values():
        if name.startswith(FIXED):
            assert "any batch of 64x96 images, because " in line
            assert "(for another size export with image_size=" in line
            assert "Guard" not in line
        else:
            assert "any batch, any height and width from 64" in line


def test_parts_equal_those_of_the_checkpoint(tmp_path, capsys):
    network = LinearClassifier(shorten(create_backbone("deit_t")), 5)
    state = {k: v for k, v in network.state_dict().items() if not k.startswith("classifier")}
    torch.save({"state_dict": state}, tmp_path / "backbone.pth")
    arguments = ["backbone=deit_t", "to=torch_export", f"ckpt={tmp_path / 'backbone.pth'}"]
    assert export.main([*arguments, "what=classifier", f"out={tmp_path / 'out'}"]) == 2
    assert "lacks the part classifier; pass what=maps, or leave it out" in capsys.readouterr().err
    assert export.main([*arguments, f"out={tmp_path / 'out'}"]) == 2  # ten blocks are missing
    assert "keys differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "exported"),
    [
        ("deit_t", {"class_token": False}, "deit_t"),
        ("gcvit_xxt", {"token_mixer": {"name": "pooling"}}, "gcvit_xxt"),
        ("lvt_r1", {"class_blocks": False}, "lvt_r1"),
        ("lvt_r1", {}, "lvt_r1_glu"),  # a plain backbone around new mixers
        ("resnet18", {}, "resnet18"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_dense_checkpoints_are_recognised_by_their_tensors(name, options, exported, tmp_path):
    path = tmp_path / "x.pth"
    for dense in (False, True):
        torch.save(create_backbone(name, dense=dense, **options).state_dict(), path)
        request = ExportRequest("onnx", exported, options, path, None, tmp_path, (64, 64), {})
        expected = "dense" if dense and name != "resnet18" else "maps"
        assert build_export_network(request).content == expected


def test_a_detector_s_run_says_that_its_backbone_is_dense(tmp_path):
    """ResNet has the same tensors in both forms."""
    path, run = tmp_path / "x.pth", {"task_name": "detection", "backbone": {"name": "resnet18"}}
    torch.save(create_backbone("resnet18", dense=True).state_dict(), path)
    request = ExportRequest("onnx", "resnet18", {}, path, run, tmp_path, (64, 64), {})
    exported = build_export_network(request)
    assert (exported.content, exported.backbone.dense) == ("dense", True)


class Function(nn.Module):
    """A function of images as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, images):
        return self.function(images)


class Asking(nn.Module):
    """Branches on a value, which a graph cannot hold."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def count(images):
    """Count, which a graph holds for one size."""
    return images * sum(1 for _ in range(int(images.shape[2]) // 7))


def test_code_that_branches_is_named_and_code_that_counts_fixes_the_size(tmp_path):
    request = small_request("deit_t", "torch_export", tmp_path)
    network = nn.Sequential(nn.Conv2d(3, 3, 1), Asking()).eval()
    with pytest.raises(ValueError, match=r"1 \(Asking\), .return x \* 2 if.*data-dep"):
        tracing.trace(network, request)
    graph = tracing.trace(Function(count), small_request("deit_t", "torch_export", tmp_path))
    assert graph.free_axes == ("batch",)
    assert graph.why_fixed == "the network's code branches on the size of its maps"
    assert graph.program.module()(torch.ones(5, 3, 64, 96)).unique().tolist() == [9.0]


@pytest.mark.parametrize(("size", "least"), [((224, 224), 64), ((64, 96), 64), ((96, 32), 32)])
def test_a_graph_takes_images_from_64_pixels_or_the_exported_size(size, least):
    request = dataclasses.replace(small_request("resnet18", "onnx", "."), image_size=size)
    assert tracing.least_side(request) == least
    graph = tracing.Graph(None, tuple(tracing.AXES.values()), "", tracing.least_side(request))
    assert (1, least, least) in graph.sizes(size)
    assert tracing.Graph(None, (), "").least == 64


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    find = importlib.util.find_spec
    without = {"onnxruntime": None}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: without.get(name, name) and find(name)
    )
    with pytest.raises(
        ValueError, match=r'needs onnxruntime, .*type: pip install "mixerlab\[.*export'
    ):
        exporter("onnx")


@pytest.fixture
def failing(monkeypatch):
    """Make every export fail with an error."""

    def fail(error):
        def refuse(request):
            raise error

        monkeypatch.setattr(export, "exporter", lambda to: refuse)

    return fail


@pytest.mark.parametrize(
    "error",
    [ImportError("mmcv's operators are not compiled"),
     OSError(errno.ENOSPC, "No space left on device")],
    ids=["package", "disk"],
)  # fmt: skip
def test_errors_of_the_machine_are_one_sentence(error, failing, tmp_path, capsys):
    failing(error)
    assert export.main(["backbone=deit_t", "to=timm", f"out={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err.startswith("export.py: ")
    assert export.main(["list", "backbone=deit_t", "to=timm,onnx", "format=json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["timm"] == record["onnx"] == "no"
    assert record["note"].count(error.args[-1]) == 2


def in_turn(names):
    return list(zip(names, cycle(("onnx", "torch_export")), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), in_turn(SMALLEST))
def test_every_family_goes_out_whole(name, to, tmp_path):
    """Classifier as ONNX, which starts as torch's program, or the dense maps, by turns."""
    sizes = export_small(name, to, tmp_path, what="classifier" if to == "onnx" else "dense")
    check_sizes(name, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_leaves_for_any_batch(name, tmp_path):
    """Behind a patch embedding, compared at three batches; ONNX starts as torch's program."""
    exporter("onnx")(mixer_request(name, "onnx", tmp_path))
    assert "any batch" in (tmp_path / "README.md").read_text()


# These have a form of ONNX's own operators, for any size but where a loop counts chunks.
FORMS = {"agent": True, "global_filter": True, "sparse_moe": True, "mlstm": False,
         "gated_delta": False}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_forms_for_onnx_serve_any_size(name, tmp_path):
    exporter("onnx")(mixer_request(name, "onnx", tmp_path, size=(112, 160)))
    text = (tmp_path / "README.md").read_text()
    assert ("any height and width" in text) == FORMS[name]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch_export", "onnx"])
def test_a_classifier_names_its_classes(to, tmp_path):
    network = LinearClassifier(shorten(create_backbone("deit_t", img_size=(64, 96))), CLASSES)
    save_ours(network, tmp_path / "last.ckpt", NATURAL)
    (tmp_path / "out").mkdir()
    request = small_request("deit_t", to, tmp_path / "out", what="classifier")
    files = exporter(to)(dataclasses.replace(request, ckpt=tmp_path / "last.ckpt"))
    assert tmp_path / "out" / "class_names.json" in files
    assert json.loads((tmp_path / "out" / "class_names.json").read_text()) == list(NATURAL)
    if to == "onnx":
        session = onnxruntime.InferenceSession(tmp_path / "out" / "classifier.onnx")
        text = session.get_modelmeta().custom_metadata_map["class_names"]
    else:
        extra = {"class_names.json": ""}
        torch.export.load(tmp_path / "out" / "classifier.pt2", extra_files=extra)
        text = extra["class_names.json"]
    assert json.loads(text) == list(NATURAL)
    assert "class_names" in (tmp_path / "out" / "README.md").read_text()
