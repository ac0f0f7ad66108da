"""GLUE's metrics, and runs of task=glue."""

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torchmetrics.functional import f1_score, matthews_corrcoef

from backbones import create_backbone
from heads.text import TextClassifier
from tasks.glue.submission import submission_name
from tasks.glue.task import measure
from tests.runs import composed


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
