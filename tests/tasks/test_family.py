"""Task families: fast imports, complete entries and the direction of metrics."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tasks.classification.family import FAMILY
from tasks.engine.callbacks.monitors import BestCheckpoint, TopCheckpoints
from tasks.engine.callbacks.optional import stop_early
from tasks.engine.family import Metric, families, family_of_task, find_family, imported
from tests.runs import CONFIGS, ROOT

LOWER = replace(FAMILY, metrics=(Metric("mae", direction="min"),), monitor="mae", headline="")


def test_importing_all_families_loads_no_library():
    code = "import sys; from tasks.engine.family import families; families(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert loaded
    assert not loaded & {"torch", "lightning", "mmdet", "mmengine", "numpy", "timm"}


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_a_family_is_complete(family):
    assert (CONFIGS / "task" / f"{family.name}.yaml").is_file()
    assert {family.monitor, family.table_metric} <= {metric.name for metric in family.metrics}
    rooms = {"evidence": "tools.analyses.evidence"}
    named = [(one, rooms.get(key, f"tools.analyses.kinds.{key}"))
             for key, one in family.analyses.items()]  # fmt: skip
    named += [(family.task, ""), (family.graph, ""), (family.pipeline, "tools.bench.pipelines"),
              (family.parts_evaluation, "tools.runs.robustness_mode")]  # fmt: skip
    if family.counted:
        named += [(family.counted.parts, "tools.papers.dense_counts"), (family.counted.inputs, "")]
    published = family.published
    data = [published.data, published.suite, *published.containers] if published else []
    for name, room in (*named, *((one, "") for one in data)):
        assert not name or imported(name, room), name
    assert family_of_task([family.task]).task == family.task


def test_families_and_the_toy_of_contributing():
    with pytest.raises(ValueError, match="unknown task 'x'; known: classification, detection"):
        find_family("x")
    assert FAMILY.is_better(2, 1)
    assert FAMILY.is_better(1, 1)
    assert not FAMILY.is_better(1, 2)
    assert LOWER.is_better(1, 2)
    assert LOWER.is_better(1, 1)
    assert not LOWER.is_better(2, 1)
    toy = "tests/newcomers/toy"  # the tutorial includes its family, and a test runs it
    assert (ROOT / toy / "tasks/toy/family.py").is_file()
    assert f"{toy}/tasks/toy/family.py" in (ROOT / "docs/tutorials/task_family.md").read_text()
    assert toy in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("family", "name", "direction"),
    [(FAMILY, "top1", "max"), (FAMILY, "mce", "min"), (FAMILY, "loss", "min"),
     (FAMILY, "top1_knn", "max"), (LOWER, "mae", "min"), (LOWER, "rmse", "min")],
)  # fmt: skip
def test_the_direction_of_a_metric(family, name, direction):
    assert family.direction(name) == direction


@pytest.mark.parametrize("mode", ["max", "min"])
def test_equal_figures_are_ranked_by_the_loss(mode, tmp_path):
    """And a resumed run knows the loss of its best checkpoint."""
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision: decision)
    best = BestCheckpoint(dirpath=tmp_path, monitor="val/x", mode=mode)

    def is_saved(figure, loss):
        metrics = {} if loss is None else {"val/loss": torch.tensor(loss)}
        trainer = SimpleNamespace(callback_metrics=metrics, strategy=strategy)
        saved = best.check_monitor_top_k(trainer, torch.tensor(figure))
        if saved:
            best.best_k_models = {"x": torch.tensor(figure)}
            best.kth_best_model_path, best.best_model_score = "x", torch.tensor(figure)
        return saved

    assert is_saved(100.0, 0.5)
    assert [is_saved(100.0, loss) for loss in (0.6, 0.5, 0.4, None)] == [False, False, True, False]
    state, best = best.state_dict(), BestCheckpoint(dirpath=tmp_path, monitor="val/x", mode=mode)
    best.load_state_dict(state)
    assert [is_saved(100.0, loss) for loss in (0.45, 0.3)] == [False, True]
    worse, better = (99.0, 101.0) if mode == "max" else (101.0, 99.0)
    assert [is_saved(worse, 0.1), is_saved(better, 0.9)] == [False, True]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equal_best_checkpoints_the_highest_loss_is_replaced(mode, tmp_path):
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision: decision)
    top = TopCheckpoints(tmp_path, "val/x", mode, 2)
    for name, loss in (("a", 0.5), ("b", 0.3), ("c", 0.4), ("d", 0.6)):
        trainer = SimpleNamespace(
            callback_metrics={"val/loss": torch.tensor(loss)}, strategy=strategy
        )
        if top.check_monitor_top_k(trainer, torch.tensor(100.0)):
            if len(top.best_k_models) == 2:
                del top.best_k_models[top.kth_best_model_path]
            top.best_k_models[name] = torch.tensor(100.0)
    assert list(top.best_k_models) == ["b", "c"]
    losses = top.state_dict()["best_k_second_scores"]
    assert [float(losses[path]) for path in "bc"] == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize(
    ("metric", "mode", "expected"),
    [(None, None, "min"), ("loss", None, "min"), ("train/loss", None, "min"),
     ("score", None, "max"), (None, "max", "max")],
)  # fmt: skip
def test_early_stopping_follows_the_metric(metric, mode, expected):
    known = {"mae": "min", "score": "max", "loss": "min"}
    (stop,) = stop_early("val/mae", known, patience=1, metric=metric, mode=mode)
    assert stop.mode == expected
    assert torch.isinf(stop.best_score)
