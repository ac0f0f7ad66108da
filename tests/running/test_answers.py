"""answers.npz: a value per sample of a test, of every family."""

import numpy as np
import pytest

from tasks.engine.answers import FILE
from tasks.engine.family import families
from tests.families import rest_slow
from tests.runs import SMALLEST, completed, summary
from tests.stand_ins import write_fashion_mnist

pytestmark = pytest.mark.usefixtures("sample_cache")

# Metrics of a set that are the mean over its samples, and their unit.
MEANS = {"top1": 100, "exact": 100, "accuracy": 100, "mse": 1, "psnr": 1}
NOT_MEANS = {"mIoU", "allAcc"}  # counted over all pixels or points


def read(folder):
    with np.load(folder / FILE) as file:
        return dict(file)


def test_what_a_sample_of_each_family_has():
    known = {family.answers for family in families().values()}
    assert known - {""} <= {*MEANS, *NOT_MEANS}
    assert [name for name, family in families().items() if not family.answers] == ["detection"]


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
    if not metric:
        assert not (tested / FILE).exists()
        return tested
    answers = read(tested)
    assert str(answers["metric"]) == metric
    assert answers["value"].dtype == np.float32
    assert np.isfinite(answers["value"]).all()
    counts = facts["data"]["samples"]
    expected = samples or counts.get("test", counts["val"])
    assert len(answers["value"]) == len(set(answers["ids"])) == expected
    assert str(tmp_path) not in str(answers["ids"])
    assert not str(answers["ids"][0]).startswith("/")
    if is_mean and metric in facts["metrics"].keys() & MEANS:
        mean = MEANS[metric] * answers["value"].astype(np.float64).mean()
        assert mean == pytest.approx(facts["metrics"][metric], rel=1e-5)
    of_training = read(fitted)
    assert (of_training["ids"] == answers["ids"]).all()
    np.testing.assert_array_equal(of_training["value"], answers["value"])
    return tested


def test_images_that_select_stay_out_of_the_answers(tmp_path, capsys):
    write_fashion_mnist(tmp_path)
    words = ("task=classification", "data=fashion_mnist", f"data.root={tmp_path}",
             "data.num_workers=0", "data.batch_size=10", "backbone=resnet18",
             "backbone.patch_size=1", "trainer.max_steps=2", "data.resident=true")  # fmt: skip
    folder = check_answers(words, "top1", tmp_path / "out", capsys, samples=20)
    assert read(folder)["ids"][3] == "t10k-images-idx3-ubyte.gz, row 3"
