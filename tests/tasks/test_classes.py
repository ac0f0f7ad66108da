"""Checkpoints are used with the classes of their training, in the same order."""

import csv
import shutil
from types import SimpleNamespace

import pytest
import torch

from backbones.checkpoints.opening import open_checkpoint
from backbones.checkpoints.seal import seal
from tasks.classification.task import ClassificationTask
from tasks.engine.classes import check_classes, classes_of, readable
from tests.runs import RECIPE, arguments, refused, run_here

pytestmark = pytest.mark.usefixtures("sample_cache")


def test_compared_classes():
    check_classes({"class_names": ["a", "b"]}, ("a", "b"), "x")
    check_classes({}, ("a", "b"), "timm's")
    check_classes({"class_names": None}, ("a", "b"), "x")
    with pytest.raises(
        ValueError,
        match=r"x was trained on the same 2 classes in another order \(checkpoint: a, b; data: b, "
        r"a\); pass data with the classes of the checkpoint, in its order",
    ):
        check_classes({"class_names": ["a", "b"]}, ("b", "a"), "x")
    with pytest.raises(ValueError, match=r"on 3 classes, and the data have 2 different ones"):
        check_classes({"class_names": ["a", "b", "c"]}, ("a", "b"), "x")
    others = {"natural": ("1", "2", "10")}
    with pytest.raises(ValueError, match=r"in another order .*; pass data\.class_order=natural$"):
        check_classes({"class_names": ["1", "2", "10"]}, ("1", "10", "2"), "x", others)
    with pytest.raises(ValueError, match="; pass data with the classes of the checkpoint"):
        check_classes({"class_names": ["2", "1", "10"]}, ("1", "10", "2"), "x", others)
    names = [f"n{i:04}" for i in range(1000)]
    moved = [*names[:990], *names[991:], names[990]]
    with pytest.raises(ValueError, match="the same 1000 classes in another order") as error:
        check_classes({"class_names": names}, moved, "x")
    said = "10 of 1000 labels differ, checkpoint against data: 990: 'n0990' there, 'n0991' here"
    assert said in str(error.value)
    assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match="999: 'n0999' there, none here"):
        check_classes({"class_names": names}, names[:-1], "x")


def test_synsets_are_read_as_words(tmp_path):
    words = {"n01440764": "tench", "n02085620": "Chihuahua", "n00000000": "n00000000",
             "tench": "tench"}  # fmt: skip
    assert {name: readable(name) for name in words} == words
    model = torch.nn.Linear(1, 1)
    model.predict = lambda batch: torch.tensor([[0.0, 2.0, 1.0]])

    def described(names):
        task = ClassificationTask(model, names, **RECIPE)
        data = SimpleNamespace(predict_name=lambda index: "fish.jpg")
        (row,) = task.describe({"sample_id": torch.tensor([0])}, data)
        task.write_results(tmp_path, [row])
        return row, task.answer(row), list(csv.reader((tmp_path / "predictions.csv").open()))

    row, answer, table = described(("n01443537", "n01440764", "bird"))
    assert row["classes"] == ["n01440764", "bird", "n01443537"]
    assert row["names"] == ["tench", "bird", "goldfish"]
    assert answer.startswith("tench (0.665), bird (")
    assert table[0][:4] == ["input", "class_1", "name_1", "probability_1"]
    assert table[1][:3] == ["fish.jpg", "n01440764", "tench"]
    row, answer, table = described(("a", "b", "c"))
    assert "names" not in row
    assert answer.startswith("b (0.665), c (")
    assert table[0][:3] == ["input", "class_1", "probability_1"]


def test_checkpoints_of_all_tasks_name_their_classes(trained):
    last = trained("detection").folder() / "checkpoints" / "last.ckpt"
    classes = classes_of(open_checkpoint(last))
    assert classes.names == tuple("0123456789")
    assert classes.category_ids == tuple(range(1, 11))
    best = trained("segmentation").folder() / "checkpoints" / "best.ckpt"
    assert classes_of(open_checkpoint(best)).names[0] == "photo"


def renamed(run, tmp_path, task):
    """Copy a run and reorder the classes in its checkpoints."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        content["class_names"] = [*content["class_names"][1:], content["class_names"][0]]
        torch.save(seal(content), path)
    return copy


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        ("classification", "test"),
        pytest.param("segmentation", "validate", marks=pytest.mark.slow),
        pytest.param("detection", "predict", marks=pytest.mark.slow),
    ],
)
def test_another_order_is_refused(task, mode, trained, tmp_path, capsys):
    run = renamed(trained(task).folder(), tmp_path, task)
    out = tmp_path / "out"
    out.mkdir()
    text = refused([f"mode={mode}", f"ckpt={run}", f"output_dir={out}", "trainer=cpu"], out, capsys)
    assert "was trained on the same 1" in text
    assert "classes in another order (checkpoint: " in text
    assert "; data: " in text


def test_resuming_with_other_classes_is_refused(trained, tmp_path, capsys):
    run = renamed(trained("classification").folder(), tmp_path, "classification")
    (run / "summary.json").unlink()  # not finished
    typed = arguments("classification", tmp_path, "resume=true", f"ckpt={run}", epochs=2)
    ended = run_here(typed, capsys)
    assert ended.status == 2
    assert "was trained on the same 10 classes in another order" in ended.err
