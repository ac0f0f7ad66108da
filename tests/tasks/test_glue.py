"""GLUE's metrics, and runs of task=glue."""

import json

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torchmetrics.functional import f1_score, matthews_corrcoef

import tasks
from backbones import create_backbone
from heads.text import TextClassifier
from tasks.glue.answers import Answers
from tasks.glue.submission import submission_name
from tasks.glue.task import GlueTask, measure
from tests.runs import composed, run_here, run_shared

TINY = ("data.num_train=64", "data.num_val=20", "trainer.max_epochs=1", "schedule.warmup=0")


def model(classes=2):
    torch.manual_seed(0)
    return TextClassifier(create_backbone("bert_tiny", img_size=16, vocabulary=30), classes)


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [("WNLI", "test.tsv", "WNLI.tsv"), ("MNLI", "test_matched.tsv", "MNLI-m.tsv"),
     ("MNLI", "test_mismatched.tsv", "MNLI-mm.tsv"), ("MNLI", "diagnostic.tsv", "AX.tsv")],
)  # fmt: skip
def test_files_of_a_submission(folder, source, name):
    assert submission_name(folder, source) == name


def test_metrics_equal_those_of_libraries():
    torch.manual_seed(0)
    guesses, labels = torch.randint(0, 2, (50,)), torch.randint(0, 2, (50,))
    found = measure("matthews", guesses, labels)
    wanted = matthews_corrcoef(guesses, labels, task="binary")
    assert found == pytest.approx(wanted.item(), abs=1e-6)
    wanted = f1_score(guesses, labels, task="binary").item()
    assert measure("f1", guesses, labels) == pytest.approx(wanted, abs=1e-6)
    one, other = torch.randn(50), torch.randn(50)
    assert measure("pearson", one, other) == pytest.approx(pearsonr(one, other)[0])
    assert measure("spearman", one, other) == pytest.approx(spearmanr(one, other)[0])
    assert measure("matthews", labels * 0, labels) == 0


def test_answers_keep_copies_of_a_batch():
    """Each tensor of a worker keeps a file open."""
    answers = Answers()
    answers.update(torch.zeros(2), *(torch.tensor([1, 0]).share_memory_() for _ in range(2)))
    assert not any(part.is_shared() for part in (*answers.labels, *answers.groups))
    assert [part.tolist() for part in answers.compute()] == [[0, 0], [1, 0], [1, 0]]


def test_mismatched_texts_are_reported_apart():
    task = GlueTask(model(3), ["a", "b", "c"], ["accuracy"])
    logits = torch.eye(3)[[0, 1, 2, 2]]
    batch = {"labels": torch.tensor([0.0, 1, 1, 2]), "group": torch.tensor([0, 0, 0, 1])}
    task.update_metrics(batch, logits)
    found = {name: value.item() for name, value in task.compute_metrics().items()}
    assert found == pytest.approx({"score": 200 / 3, "accuracy": 200 / 3, "mismatched": 100})
    with pytest.raises(ValueError, match="measured must name some of accuracy, f1"):
        GlueTask(model(), ["a", "b"], ["bleu"])


def test_a_score_is_trained_by_squared_error():
    head = model(1).eval()
    batch = {"tokens": torch.randint(0, 30, (3, 7)), "segments": torch.zeros(3, 7).long(),
             "mask": torch.ones(3, 7).bool(), "labels": torch.tensor([1.0, 4.5, 0.2])}  # fmt: skip
    wanted = (head.predict(batch).squeeze(1) - batch["labels"]).square().mean()
    torch.testing.assert_close(head.loss(batch)["loss_mse"], wanted)


def test_the_published_rows():
    config = composed("experiment=afbo_t12_bert_base_afbo_cola", "data.root=/d")
    assert config.optimizer["lr"] == 2e-5
    assert config.trainer["max_epochs"] == 3
    config = composed("experiment=afbo_t12_gpt1_rte", "data.root=/d")
    assert config.optimizer["lr"] == 6.25e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ["task=glue", "backbone=bert_tiny_afbo", "trainer=cpu", "logger=csv"]
    ended = run_shared([*words, *TINY, f"output_dir={folder}"])
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.slow
def test_a_run_ends_with_figures_and_predicts(trained, tmp_path, capsys):
    folder = trained.folder()
    found = json.loads((folder / "summary.json").read_text())
    assert {"score", "matthews", "loss"} == found["metrics"].keys()
    assert len(list((folder / "preview").glob("*.png"))) == 1
    typed = ["mode=predict", f"ckpt={folder}", f"output_dir={tmp_path / 'out'}"]
    ended = run_here([*typed, "input=The dog sees the cats."], capsys)
    assert ended.status == 0, ended.err
    (row,) = json.loads((ended.folder() / "predictions.json").read_text())
    assert row["class"] in ("0", "1")
    (same,) = tasks.load(folder).predict(["The dog sees the cats."])
    assert same["class"] == row["class"]
