"""Whole graphs for OpenVINO: their answers, their metadata, and the script that runs them."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tasks
from tests.runs import run_shared
from tests.whole_graphs import CALL, WORDS, check_alike, inputs_of, plain_answers
from tools import export
from tools.exports import openvino_graph
from tools.exports.checked_files import open_onnx, save_onnx

SCRIPTS = sorted(Path(tasks.__file__).parent.glob("*/infer.py"))
IS_INSTALLED = importlib.util.find_spec("openvino") is not None
with_openvino = pytest.mark.skipif(not IS_INSTALLED, reason="openvino is not installed")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_scripts_name_openvino_in_place_of_onnxruntime(script):
    text = openvino_graph.script(script.read_text())
    assert "onnx" not in text
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert {"openvino", "session", "facts"} <= names


@with_openvino
def test_a_converted_graph_answers_as_its_source(tmp_path):
    import openvino

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    images = torch.randn(2, 3, 8, 8)
    network(images)
    path, facts = tmp_path / "whole.onnx", {"classes": ['"a"', "<b>", "ü\n"]}
    names = {"input_names": ["images"], "output_names": ["logits"]}
    save_onnx(torch.export.export(network, (images,)), path, facts, **names)
    feed = {"images": images.numpy()}
    (expected,) = open_onnx(path).run(None, feed)
    session = openvino_graph.open_session(path)
    assert [entry.name for entry in session.get_inputs()] == ["images"]
    np.testing.assert_allclose(session.run(["logits"], feed)[0], expected, atol=1e-5)
    files = openvino_graph.save(path)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    model = openvino.Core().read_model(files[0])
    np.testing.assert_allclose(
        openvino_graph.Session(model).run(None, feed)[0], expected, atol=1e-5
    )
    entries = model.get_rt_info(openvino_graph.FACTS).value.items()
    assert {key: json.loads(text) for key, text in entries} == facts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backbone=resnet18"], "to=openvino takes a trained run"),
        (["what=maps"], "cannot use 'what=maps'"),
        (["ckpt=nowhere"], "nowhere"),
    ],
)
def test_other_requests_are_refused_in_a_line(words, message, capsys):
    assert export.main(["to=openvino", *words]) == 2
    err = capsys.readouterr().err
    assert (message if IS_INSTALLED else 'pip install "mixerlab[dense,export,openvino]"') in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@with_openvino
@pytest.mark.parametrize("family", ["classification", "segmentation", "detection"])
@pytest.mark.parametrize("form", ["float", "int8"])
def test_runs_leave_for_openvino(family, form, tmp_path, capsys, sample_cache):
    ended = run_shared(
        [f"task={family}", *WORDS[family], "trainer=cpu", "trainer.max_epochs=1",
         "schedule.warmup=0", f"output_dir={tmp_path}"]
    )  # fmt: skip
    assert ended.status == 0, ended.err
    out = tmp_path / "out"
    words = ["to=openvino", f"ckpt={ended.folder()}", f"out={out}"]
    assert export.main([*words, *(["int8=true"] if form == "int8" else [])]) == 0
    files = {"whole.xml", "whole.bin", "infer.py", "README.md"}
    assert {file.name for file in out.iterdir() if file.name[0] != "."} == files
    inputs = inputs_of(family, None, tmp_path)
    command = [sys.executable, "-c", CALL, out, *inputs]
    answered = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answered.returncode == 0, answered.stderr
    answers = json.loads(answered.stdout)
    assert len(answers) == len(inputs)
    if form == "float":
        task = tasks.load(ended.folder())
        for answer, row in zip(answers, task.predict(inputs), strict=True):
            check_alike(family, answer, plain_answers(family, row))
    else:
        assert "cannot tell" in capsys.readouterr().err
        assert "cannot tell" in (out / "README.md").read_text()
