"""answers.npz: a value per sample of a test, of every family."""

import numpy as np
import pytest

from tasks.engine.answers import FILE
from tasks.engine.family import families
from tests.families import rest_slow
from tests.runs import SMALLEST, completed, summary
from tests.stand_ins import write_fashion_mnist
from tools.comparison.answers import read_answers
from tools.comparison.journal import Run

pytestmark = pytest.mark.usefixtures("sample_cache")

# Metrics of a set that are the mean over its samples, and their unit.
MEANS = {"top1": 100, "exact": 100, "accuracy": 100, "mse": 1, "psnr": 1}
OF_SETS = {"mIoU": 100, "AP": 1}  # counted or ranked over all samples


def read(folder):
    with np.load(folder / FILE) as file:
        return dict(file)


def test_what_a_sample_of_each_family_has():
    known = {family.answers for family in families().values()}
    assert known == {*MEANS, *OF_SETS}


@pytest.mark.parametrize("family", rest_slow(list(families()), ["classification", "forecasting"]))
def test_a_test_keeps_a_value_per_sample(family, tmp_path, capsys):
    typed = (f"task={family}", *SMALLEST[family], "trainer.limit_train_batches=2")
    check_answers(typed, families()[family].answers, tmp_path, capsys)


@pytest.mark.slow
def test_a_text_has_the_loss_of_its_words(tmp_path, capsys):
    words = ("task=glue", *SMALLEST["glue"], "protocol=mlm")
    check_answers(words, "loss", tmp_path, capsys, is_mean=False)


def check_answers(typed, metric, tmp_path, capsys, *, is_mean=True, samples=None):
    """Train and test; return the folder of the test."""
    usual = ("trainer=cpu", "logger=csv", f"output_dir={tmp_path}")
    few = ("trainer.max_epochs=1", "schedule.warmup=0", "schedule.name=constant")
    fitted = completed([*typed, *usual, *few], capsys).folder()
    tested = completed(["mode=test", f"ckpt={fitted}", *usual], capsys).folder()
    facts = summary(tested)
    answers = read(tested)
    assert str(answers["metric"]) == metric
    counts = facts["data"]["samples"]
    expected = samples or counts.get("test", counts["val"])
    assert len(set(answers["ids"])) == expected
    assert str(tmp_path) not in str(answers["ids"])
    assert not str(answers["ids"][0]).startswith("/")
    if metric != "AP":
        assert answers["value"].dtype == np.float32
        assert np.isfinite(answers["value"]).all()
        assert len(answers["value"]) == expected
    if is_mean and metric in facts["metrics"].keys() & {*MEANS, *OF_SETS}:
        run = Run(stage="final", mixer="", host="", data="", seed=0, factor=1,
                  folder=str(tested), value=facts["metrics"][metric])  # fmt: skip
        found = read_answers([run], metric)
        assert found.scale == (MEANS | OF_SETS)[metric] or run.value == 0
        if metric in MEANS:
            assert found.scale * found.table.mean() == pytest.approx(run.value, rel=1e-5)
        else:
            ones = np.ones((1, expected))
            assert found.scale * found.measure(0, ones)[0] == pytest.approx(run.value, rel=1e-5)
    of_training = read(fitted)
    assert of_training.keys() == answers.keys()
    for name, array in answers.items():
        np.testing.assert_array_equal(of_training[name], array)
    return tested


def test_images_that_select_stay_out_of_the_answers(tmp_path, capsys):
    write_fashion_mnist(tmp_path)
    words = ("task=classification", "data=fashion_mnist", f"data.root={tmp_path}",
             "data.num_workers=0", "data.batch_size=10", "backbone=resnet18",
             "backbone.patch_size=1", "trainer.max_steps=2", "data.resident=true")  # fmt: skip
    folder = check_answers(words, "top1", tmp_path / "out", capsys, samples=20)
    assert read(folder)["ids"][3] == "t10k-images-idx3-ubyte.gz, row 3"
