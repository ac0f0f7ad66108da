"""README and infer.py of an export's folder, which run without our packages."""

import json
import subprocess
import sys
import types

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from datamodules.images.transforms import LightAugmentation, PaperAugmentation
from datamodules.loading.pixels import scale_bytes
from tests.small_export import AUGMENTATIONS, run_config, small_request
from tools.exports import preprocessing, usage
from tools.exports.preprocessing import describe_preprocessing
from tools.exports.tracing import AXES, Graph

# Runs a script in which only its stated requirements can be imported.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "timm", "backbones", "datamodules", "tools"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WEIGHT = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32) * 9


def save_picture(path, size=(131, 90)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def save_means_as_logits(path, metadata):
    """Write a model that returns the mean colour times a matrix as logits."""
    shape = ["batch", 3, "height", "width"]
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "means",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(WEIGHT, "weight")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)


def run_infer(folder, image):
    """Run infer.py in a process without torch and our packages; return its output."""
    command = [sys.executable, "-I", "-c", ALONE, folder / "infer.py", image]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_infer_needs_onnxruntime_and_pillow_and_prepares_images_as_the_run(kind, tmp_path):
    request = small_request("resnet18", "onnx", tmp_path, what="classifier")
    prepared = describe_preprocessing(
        run_config(AUGMENTATIONS[kind]), None, (64, 64), has_fixed_size=False
    )
    classes = ["a", "b", "c", "ü\x1b"]
    metadata = {"preprocessing": json.dumps(prepared), "class_names": json.dumps(classes)}
    save_means_as_logits(tmp_path / "classifier.onnx", metadata)
    graph = Graph(None, tuple(AXES.values()), "")
    described = usage.Described("classifier.onnx", graph, ["logits"], prepared)
    usage.write_usage(request, [described], classes)

    options = {k: v for k, v in AUGMENTATIONS[kind].items() if k != "_target_"}
    made = (PaperAugmentation if kind == "paper" else LightAugmentation)(**options)
    image = save_picture(tmp_path / "x.png")
    pixels = scale_bytes(made.eval(64)(Image.open(image)), 255, made.mean, made.std)
    means = pixels.mean((1, 2))
    shares = (means @ torch.from_numpy(WEIGHT)).softmax(0)
    expected = [f"{shares[k]:.4f}  {classes[k]!r}" for k in shares.argsort(descending=True)]
    assert run_infer(tmp_path, image) == expected


@pytest.mark.parametrize(("turns", "channels"), [(True, "RGB"), (False, "BGR")])
def test_a_detectors_images_have_the_channels_and_sides_of_its_own(turns, channels, monkeypatch):
    mean = torch.tensor([[[103.53]], [[116.28]], [[123.675]]])
    processor = types.SimpleNamespace(mean=mean, std=torch.ones(3, 1, 1), _channel_conversion=turns)
    model = types.SimpleNamespace(data_preprocessor=processor)
    parts = {"data": types.SimpleNamespace(scale=(1333, 800)),
             "head": types.SimpleNamespace(model=model)}  # fmt: skip
    monkeypatch.setattr(preprocessing, "build", lambda run, group, **options: parts[group])
    run = {"task_name": "detection", "seed": 0, "head": {}, "data": {}}
    prepared = describe_preprocessing(run, None, (64, 96), has_fixed_size=False)
    assert prepared["resize"] == {"longest_side_at_most": 1333, "shortest_side_at_most": 800}
    assert (prepared["channels"], prepared["upright"]) == (channels, True)
    assert prepared["mean"] == [0.406, 0.456, 0.485]
    described = usage.Described("dense.onnx", Graph(None, (), ""), ["map_4"], prepared)
    script = usage._script(usage.FORMATS["onnx"], described, ())
    assert ("[..., ::-1]" in script) == (channels == "BGR")
    assert "exif_transpose" in script


@pytest.mark.parametrize(("fixed", "side"), [(True, 96), (False, 64)])
def test_preprocessing_of_a_typed_size(fixed, side):
    prepared = describe_preprocessing(None, None, (64, 96), has_fixed_size=fixed)
    assert (prepared["resize"], prepared["crop"]) == ({"height": 64, "width": 96}, None)
    run = run_config(AUGMENTATIONS["paper"])
    prepared = describe_preprocessing(run, None, (96, 96), has_fixed_size=fixed)
    assert prepared["crop"] == [side, side]
    assert prepared["resize"] == {"shorter_side": int(side / 0.8)}
    assert prepared["source"] == "the run's validation"
