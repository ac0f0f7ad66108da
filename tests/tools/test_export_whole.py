"""Whole graphs of runs: the checkpoint's answers, in an environment of three packages."""

import ast
import json
import re
import subprocess
import sys
import sysconfig
import types
import venv
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import tasks
from tasks.detection.whole import gaps
from tests.runs import SCENES, SMALLEST, run_shared
from tests.whole_graphs import (
    CALL,
    WHOLE,
    WORDS,
    check_alike,
    inputs_of,
    plain_answers,
)
from tools import export
from tools.exports.whole_graph import Comparison

SCRIPTS = sorted(Path(tasks.__file__).parent.glob("*/infer.py"))
NEEDED = ("numpy", "numpy.libs", "PIL", "pillow.libs", "onnxruntime")
SCORES = "++head.options={test_cfg:{score_thr:0.005}}"
BOXES = (
    "++head.options={roi_head:{bbox_head:{fc_out_channels:64}},test_cfg:{rcnn:{score_thr:0.05}}}"
)
FEW = ("head.num_rois=16", "head.num_proposals=30")
# Besides RetinaNet: the words of each other head whose whole graph the documentation promises.
DETECTORS = {
    **{
        name: ("head=retinanet", f"head.name={name}", f"head.base={base}", SCORES)
        for name, base in (
            ("fcos", "fcos/fcos_r50-caffe_fpn_gn-head_1x_coco"),
            ("atss", "atss/atss_r50_fpn_1x_coco"),
            ("fsaf", "fsaf/fsaf_r50_fpn_1x_coco"),
            ("free_anchor", "free_anchor/freeanchor_r50_fpn_1x_coco"),
        )
    },
    "faster_rcnn": ("head.base=faster_rcnn/faster-rcnn_r50_fpn_1x_coco", *FEW, BOXES),
    "mask_rcnn": SMALLEST["detection"][1:],
    "cascade_mask_rcnn": (
        "head=cascade_mask_rcnn",
        *FEW,
        "++head.options={test_cfg:{rcnn:{score_thr:0.05}}}",
    ),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The interpreter of an environment that holds numpy, Pillow and onnxruntime alone."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": folder}))
    for name in NEEDED:
        package = Path(sysconfig.get_path("purelib"), name)
        if package.is_dir():
            (site / name).symlink_to(package)
    return folder / "bin" / "python"


@pytest.fixture(scope="module", params=WHOLE)
def exported(request, tmp_path_factory, sample_cache):
    """Family, task and folder of the exported graph of a run of a few steps."""
    family, output = request.param, tmp_path_factory.mktemp(request.param)
    ended = run_shared(
        [f"task={family}", *WORDS[family], "trainer=cpu", "trainer.max_epochs=1",
         "schedule.warmup=0", f"output_dir={output}"]
    )  # fmt: skip
    assert ended.status == 0, ended.err
    assert export.main(["to=onnx", f"ckpt={ended.folder()}", f"out={output / 'out'}"]) == 0
    return family, tasks.load(ended.folder()), output / "out"


@pytest.mark.slow
def test_a_graph_answers_as_the_checkpoint_with_three_packages(exported, bare, tmp_path):
    family, task, folder = exported
    assert {file.name for file in folder.iterdir()} >= {"whole.onnx", "infer.py", "README.md"}
    inputs = inputs_of(family, task, tmp_path)
    command = [bare, "-I", "-c", CALL, folder, *inputs]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    for answer, row in zip(answers, task.predict(inputs), strict=True):
        check_alike(family, answer, plain_answers(family, row))
    modules = subprocess.run([bare, "-I", "-c", "import torch"], capture_output=True, check=False)
    assert modules.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_each_promised_detector_leaves_whole(name, tmp_path, sample_cache):
    """The command compares every detection with the checkpoint's before the folder appears."""
    words = dict.fromkeys((*SCENES, *DETECTORS[name]))
    ended = run_shared(
        ["task=detection", "backbone=resnet18", *words, "trainer=cpu", "trainer.max_epochs=1",
         "schedule.warmup=0", f"output_dir={tmp_path}"]
    )  # fmt: skip
    assert ended.status == 0, ended.err
    folder = tmp_path / "out"
    assert export.main(["to=onnx", "what=whole", f"ckpt={ended.folder()}", f"out={folder}"]) == 0
    text = (folder / "README.md").read_text()
    assert int(re.search(r"of ([\d,]+) answers", text)[1].replace(",", "")) > 0
    assert "Guard" not in text


@pytest.mark.slow
def test_the_file_states_its_origin(exported):
    facts = onnxruntime.InferenceSession(exported[2] / "whole.onnx").get_modelmeta()
    facts = {name: json.loads(text) for name, text in facts.custom_metadata_map.items()}
    assert facts["task"] == exported[0]
    assert len(facts["fingerprint"]["checkpoint"]) == 64
    assert facts["licence"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_scripts_are_short_and_import_three_packages(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 40
    tree = ast.parse(text)
    names = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert names - set(sys.stdlib_module_names) <= {"numpy", "PIL", "onnxruntime"}


@pytest.mark.parametrize("family", ["detection", "segmentation"])
def test_images_are_resized_as_by_opencv(family):
    """To one grey value, which a few of its vector instructions round another way."""
    cv2 = pytest.importorskip("cv2")
    text = (Path(tasks.__file__).parent / family / "infer.py").read_text()
    names = {"np": np}
    exec(text[text.index("def resized") : text.index("def predict")], names)
    random = np.random.default_rng(0)
    for height, width, long, short in ((50, 71, 200, 90), (200, 90, 71, 50), (60, 80, 40, 30)):
        x = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        resized = names["resized"](x, long, short)
        expected = cv2.resize(x, resized.shape[1::-1], interpolation=cv2.INTER_LINEAR)
        gaps = np.abs(resized.astype(int) - expected)
        assert gaps.max() <= 1
        assert (gaps > 0).mean() < 0.01


def detections(*rows):
    boxes, scores, labels = zip(*rows, strict=True) if rows else ((), (), ())
    return types.SimpleNamespace(
        bboxes=torch.tensor(boxes).reshape(-1, 4),
        scores=torch.tensor(scores),
        labels=torch.tensor(labels),
    )


def test_a_swapped_box_is_no_box_of_the_checkpoint():
    one, two = ([0.0, 0, 10, 10], 0.9, 0), ([20.0, 0, 40, 40], 0.5, 0)
    swapped = (one[0], two[1], 0), (two[0], one[1], 0)
    relabelled = (one[0], one[1], 1), two
    cases = [
        ((one, two), [0, 0, 0, 0]),
        ((two, one), [0, 0, 0, 0]),
        (swapped, [0.4, 0.4, 0.4, 0.4]),
        (relabelled, [0.75, 0, 0.8, 0]),
        ((one,), [0, 0.4, 0]),
        ((), [0.8, 0.4]),  # above the least score, 0.1
    ]
    for rows, expected in cases:
        found = gaps(detections(one, two), detections(*rows), 0.1, 100)
        assert found.tolist() == pytest.approx(expected)
    full = gaps(detections(one, two), detections(one), 0.1, 2)
    assert full.tolist() == pytest.approx([0, 0, 0])  # the last of a full list may be another one


def compared(**changes):
    return Comparison(**{"samples": 10, "answers": 5000, "before": 50.0, "after": 50.0, **changes})


@pytest.mark.parametrize(
    ("changes", "flips", "point", "said"),
    [
        ({}, 0, 1.0, ""),
        ({"differing": 1}, 0, 1.0, "1 of 5,000 answers"),
        ({"differing": 5}, 1e-3, 1.0, ""),
        ({"differing": 6}, 1e-3, 1.0, "6 of 5,000 answers"),
        ({"after": 60.0}, 0, 1.0, ""),  # one of ten samples
        ({"after": 60.1}, 0, 1.0, "is 60.1 by the graph"),
        ({"samples": 2000, "after": 50.2}, 0, 1.0, "is 50.2 by the graph"),
        ({"after": float("nan")}, 0, 1.0, "is nan by the graph"),
        ({"before": 0.5, "after": 0.61}, 0, 0.01, "is 0.61 by the graph"),
        ({"before": 2.0, "after": 2.1}, 0, None, ""),
        ({"before": 2.0, "after": 2.3}, 0, None, "is 2.3 by the graph"),
    ],
)
def test_graphs_of_other_answers_are_refused(changes, flips, point, said):
    comparison = compared(**changes)
    if not said:
        comparison.check("top1", flips, point)
        return
    with pytest.raises(ValueError, match=said):
        comparison.check("top1", flips, point)
