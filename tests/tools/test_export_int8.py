"""INT8 forms of whole graphs: what is quantised, what a loss is, and what is refused."""

import json
import math
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from scipy import stats
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MultilabelAveragePrecision,
)

from tests.runs import run_shared
from tests.whole_graphs import WORDS
from tools import export
from tools.comparison.answers import Means
from tools.comparison.statistics import samples_interval
from tools.exports.checked_files import open_onnx, save_onnx
from tools.exports.int8 import Measured, judge, write_int8
from tools.exports.int8_graph import cosines, network_layers, quantise
from tools.exports.paired_metrics import GROUPS, PairedMetric, joined

CLASSES, SIDE = 10, 12
HUGE = 1e4


class Small(nn.Module):
    """Convolutions between a normalisation and a product that are no layers of the network."""

    def __init__(self, channel_scale):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
        )  # fmt: skip
        with torch.no_grad():
            # The same function, but one range for all channels loses all others.
            self.network[0].weight[0] *= channel_scale
            self.network[0].bias[0] *= channel_scale
            self.network[2].weight[:, 0] /= channel_scale

    def forward(self, images):
        return self.network(images / 255) @ torch.eye(CLASSES)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A graph that INT8 serves, and one that it breaks."""
    folder, paths = tmp_path_factory.mktemp("graphs"), {}
    for name, scale in (("sound", 1.0), ("broken", HUGE)):
        images = torch.zeros(2, 3, SIDE, SIDE)
        batch = torch.export.Dim("batch")
        program = torch.export.export(Small(scale).eval(), (images,), dynamic_shapes=({0: batch},))
        paths[name] = folder / f"{name}.onnx"
        names = {"input_names": ["images"], "output_names": ["logits"]}
        axes = ({0: "batch"},)
        save_onnx(program, paths[name], {"task": "a task"}, **names, dynamic_shapes=axes)
    return paths


def feeds(count, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(max(1, count // 16)):
        yield {"images": random.uniform(0, 255, (16, 3, SIDE, SIDE)).astype(np.float32)}


def agreement(path, samples):
    """A measurement of a graph as right where it chooses what the float graph surely chose."""
    before = open_onnx(path)

    def compare(file, layers, kept):
        after, right = open_onnx(file), []
        for feed in feeds(2 * samples, seed=1):
            exact, rounded = (session.run(None, feed)[0] for session in (before, after))
            second, first = np.sort(exact, 1)[:, -2:].T
            is_sure = np.argsort(first - second)[len(exact) // 2 :]
            right.append((exact.argmax(1) == rounded.argmax(1))[is_sure])
        right = np.concatenate(right)
        loss = 100 * float(1 - right.mean())
        low, high = samples_interval([loss], Means([1.0 - right], 100))
        verdict = judge(samples, loss, low, high)
        return Measured(
            "top1", 100.0, 100 - loss, loss, low, high, samples, verdict, layers, tuple(kept)
        )

    return compare


def test_layers_of_the_network_alone_are_quantised(graphs, tmp_path):
    labels = network_layers(onnx.load(graphs["sound"]))
    assert list(labels.values()) == ["0", "2", "6"]
    quantise(graphs["sound"], tmp_path / "a.onnx", feeds(64), labels)
    model = onnx.load(tmp_path / "a.onnx")
    ends, names = ".weight_quantized", {entry.name for entry in model.graph.initializer}
    weights = {name.removesuffix(ends) for name in names if name.endswith(ends)}
    assert weights == {"network.0", "network.2", "network.6"}
    values = cosines(graphs["sound"], tmp_path / "a.onnx", feeds(16))
    assert all(cosine > 0.999 for cosine in values.values())


def test_the_layer_that_breaks_has_the_worst_cosine(graphs, tmp_path):
    labels = network_layers(onnx.load(graphs["broken"]))
    quantise(graphs["broken"], tmp_path / "a.onnx", feeds(64), labels)
    values = cosines(graphs["broken"], tmp_path / "a.onnx", feeds(32))
    worst = min(values, key=values.get)
    assert labels[worst] == "2"
    assert values[worst] < 0.9
    assert min(cosine for name, cosine in values.items() if name != worst) > 0.99
    quantise(graphs["broken"], tmp_path / "b.onnx", feeds(64), {*labels} - {worst})
    (feed,) = feeds(16)
    exact, kept = (
        open_onnx(path).run(None, feed)[0] for path in (graphs["broken"], tmp_path / "b.onnx")
    )
    np.testing.assert_allclose(kept, exact, atol=0.02)


@pytest.mark.parametrize(
    ("name", "keeps", "samples", "verdict", "kept"),
    [
        ("sound", False, 8000, "within 1 point", ()),
        ("sound", False, 48, "cannot tell", ()),
        ("broken", True, 8000, "within 1 point", ("2",)),
        ("broken", False, 8000, "more than 1 point", ()),
        ("broken", False, 240, "more than 1 point", ()),
    ],
)
def test_a_graph_is_written_if_its_loss_holds(
    graphs, tmp_path, name, keeps, samples, verdict, kept
):
    path = tmp_path / "whole.onnx"
    before = graphs[name].read_bytes()
    path.write_bytes(before)
    lines = []

    def write():
        compare = agreement(graphs[name], samples)
        return write_int8(path, feeds, compare, keeps=keeps, report=lines.append)

    if verdict == "more than 1 point":
        message = r"points lost.*worst first: 2 0\..*int8\.keep=auto"
        with pytest.raises(ValueError, match=message) as error:
            write()
        assert "\n" not in str(error.value)
        assert path.read_bytes() == before
    else:
        result = write()
        assert (result.verdict, result.float_layers) == (verdict, kept)
        facts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
        facts = {entry: json.loads(text) for entry, text in facts.items()}  # as infer.py does
        assert facts["int8"]["verdict"] == verdict
        assert len(facts["int8"]["trials"]) == 1 + len(kept)
        assert facts["task"] == "a task"
        assert verdict in lines[-1]
        assert all(name in lines[-1] for name in kept)
    assert [file.name for file in tmp_path.iterdir()] == ["whole.onnx"]


def test_a_graph_that_needs_float_everywhere_is_refused(graphs, tmp_path):
    path = tmp_path / "whole.onnx"
    path.write_bytes(graphs["sound"].read_bytes())
    tried = []

    def compare(file, layers, kept):
        tried.append(layers)
        lost = (80.0, 78.0, 82.0, 5000, "more than 1 point")
        return Measured("top1", 90.0, 10.0, *lost, layers, kept)

    with pytest.raises(ValueError, match="with 2 layers in float"):
        write_int8(path, feeds, compare, keeps=True, report=lambda text: None)
    assert tried == [3, 2, 1]


@pytest.mark.parametrize(
    ("samples", "loss", "low", "high", "verdict"),
    [
        (1000, 0.2, -0.1, 0.5, "within 1 point"),
        (1000, -0.5, -0.9, -0.1, "within 1 point"),
        (1000, 0.6, 0.1, 1.1, "cannot tell"),
        (1000, 1.2, 0.7, 1.7, "more than 1 point"),
        (999, 0.0, 0.0, 0.0, "cannot tell"),
        (40, 5.0, -1.0, 11.0, "cannot tell"),
        (40, 50.0, 30.0, 70.0, "more than 1 point"),
        (1000, math.nan, math.nan, math.nan, "more than 1 point"),
    ],
)
def test_verdicts_follow_the_interval(samples, loss, low, high, verdict):
    assert judge(samples, loss, low, high) == verdict


class MeasuredTask:
    """The parts of a task that a paired metric asks for."""

    metric_stores = ("metric",)

    def __init__(self, metric, figure):
        self.metric, self.figure = metric, figure
        self.family = SimpleNamespace(monitor="figure")

    def reset_metrics(self):
        self.metric.reset()

    def update_metrics(self, batch, predictions):
        self.metric.update(predictions, *batch)

    def compute_metrics(self):
        return {"figure": self.figure(self.metric.compute())}


def miou(counts):
    hits = counts.double().diag()
    return (hits / (counts.sum(0) + counts.sum(1) - hits)).mean()


def chances(random, labels, right):
    """Return probabilities (n, CLASSES) whose largest is of the label for a share of rows."""
    shares = random.random((len(labels), CLASSES))
    rows = np.flatnonzero(random.random(len(labels)) < right)
    shares[rows, labels[rows]] = 1.5
    return torch.tensor(shares)


def several(classes):
    return MetricCollection(
        {f"top{k}": MulticlassAccuracy(classes, top_k=k, average="micro") for k in (1, 5)}
    )


METRICS = {
    "accuracy": (several(CLASSES), lambda figures: 100 * figures["top1"], lambda x: x),
    "mIoU": (MulticlassConfusionMatrix(CLASSES), miou, lambda x: x.argmax(1)),
    "mAP": (MultilabelAveragePrecision(CLASSES), lambda value: value, lambda x: x.clamp(max=1)),
}


def pair_of(name, samples=1000, batch=40):
    """Return the difference of a metric, with each update by hand."""
    metric, figure, form = METRICS[name]
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, samples)
    truth = torch.tensor(labels)
    if name == "mAP":
        truth = torch.nn.functional.one_hot(truth, CLASSES)
    first = chances(random, labels, 0.8)
    is_same = torch.tensor(random.random(samples) < 0.9)[:, None]
    second = torch.where(is_same, first, chances(random, labels, 0.6))
    task = MeasuredTask(metric, figure)
    paired = PairedMetric(task, samples)
    for start in range(0, samples, batch):
        rows = slice(start, start + batch)
        paired.update((truth[rows],), form(first[rows]), form(second[rows]), batch)
    wholes = []
    for predictions in (first, second):
        task.metric = METRICS[name][0].clone()
        task.reset_metrics()
        task.update_metrics((truth,), form(predictions))
        wholes.append(float(task.compute_metrics()["figure"]))
    rights = [(x.argmax(1) == torch.tensor(labels)).double().numpy() for x in (first, second)]
    return paired.compute(), wholes, rights


@pytest.mark.parametrize("name", METRICS)
def test_paired_metrics_equal_those_of_all_samples(name):
    pair, (before, after), _ = pair_of(name)
    assert (pair.before, pair.after) == pytest.approx((before, after))
    assert pair.low < after - before < pair.high


def test_the_interval_is_that_of_the_samples_answers():
    pair, (before, after), (first, second) = pair_of("accuracy")
    low, high = samples_interval([after - before], Means([second - first], 100))
    assert pair.high - pair.low == pytest.approx(high - low, rel=0.35)
    assert (pair.high + pair.low) / 2 == pytest.approx((high + low) / 2, abs=0.2)


def test_the_interval_of_a_mean_is_students_over_groups():
    first, second = np.random.default_rng(0).normal(size=(2, 250))
    paired = PairedMetric(MeasuredTask(MeanMetric(), lambda mean: mean), 250)
    for start in range(0, 250, 5):
        rows = [torch.tensor(values[start : start + 5]) for values in (first, second)]
        paired.update((), *rows, 5)
    pair, means = paired.compute(), (second - first).reshape(GROUPS, -1).mean(1)
    width = stats.t.isf(0.025, GROUPS - 1) * means.std(ddof=1) / GROUPS**0.5
    expected = means.mean() - width, means.mean() + width
    assert (pair.low, pair.high) == pytest.approx(expected, rel=1e-3)


def test_detections_of_parts_are_those_of_all():
    coco_metric = pytest.importorskip("tasks.detection.coco_metric")
    box = {"bbox": [0.0, 0, 10, 10], "category_id": 1}
    annotations = {
        "images": [{"id": image} for image in range(4)],
        "annotations": [
            {"id": image, "image_id": image, "area": 100.0, "iscrowd": 0, **box}
            for image in range(4)
        ],
        "categories": [{"id": 1, "name": "a"}],
    }
    whole, *parts = (coco_metric.CocoMetric(annotations, [1], with_masks=False) for _ in range(3))
    rows = {image: [{"image_id": image, "score": 0.5, **box}] for image in range(3)} | {3: []}
    whole.detections = rows
    for part, images in zip(parts, ((0, 1), (2, 3)), strict=True):
        part.detections = {image: rows[image] for image in images}
    assert joined(parts).compute() == whole.compute()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["to=onnx", "backbone=resnet18", "int8=true"], "what=whole takes a run"),
        (["to=onnx", "backbone=resnet18", "int8=true", "what=maps"], "leave what=maps out"),
        (["to=onnx", "backbone=resnet18", "int8.keep=auto"], "what=whole takes a run"),
        (["to=onnx", "backbone=resnet18", "int8=yes"], "int8 must be one of false, true"),
        (["to=onnx", "backbone=resnet18", "int8.keep=head"], "int8.keep must be one of auto"),
        (["to=torch_export", "backbone=resnet18", "int8=true"], "cannot use 'int8=true'"),
    ],
)
def test_other_requests_are_refused_in_a_line(words, message, capsys):
    assert export.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["classification", "segmentation", "detection", "glue"])
def test_runs_of_each_kind_leave_in_int8(family, tmp_path, capsys, sample_cache):
    ended = run_shared(
        [f"task={family}", *WORDS[family], "trainer=cpu", "trainer.max_epochs=1",
         "schedule.warmup=0", f"output_dir={tmp_path}"]
    )  # fmt: skip
    assert ended.status == 0, ended.err
    words = ["to=onnx", f"ckpt={ended.folder()}", f"out={tmp_path / 'out'}", "int8=true"]
    assert export.main(words) == 0
    assert "INT8 cannot tell (1,000 samples are needed)" in capsys.readouterr().err
    path = tmp_path / "out" / "whole.onnx"
    facts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    facts = json.loads(facts["int8"])
    assert facts["verdict"] == "cannot tell"
    assert facts["layers"] > 5
    assert math.isfinite(facts["after"])
    assert "cannot tell" in (tmp_path / "out" / "README.md").read_text()
    model = onnx.load(path)
    stem = {node.name for node in model.graph.node if node.op_type == "QuantizeLinear"}
    assert stem
