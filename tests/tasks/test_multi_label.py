"""Classification with any number of labels: metrics, predictions, and its runs."""

import csv

import numpy as np
import pytest
import torch
from lightning import Trainer
from sklearn.metrics import average_precision_score, f1_score
from torch.utils.data import DataLoader

import tasks
from backbones import create_backbone
from datamodules import SampleMultiLabel
from heads.linear import LinearClassifier
from tasks import ClassificationTask, MultiLabelTask
from tests.runs import QUIET

NAMES = ["cat", "dog", "fox", "owl"]


def task(**options):
    return MultiLabelTask(
        LinearClassifier(create_backbone("resnet18", img_size=64), 4), NAMES, **options
    )


def test_metrics_equal_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 4, generator=generator)
    labels = (torch.rand(40, 4, generator=generator) < 0.3).float()
    labels[:, 3] = 0  # a class that does not occur
    one = task(threshold=0.4)
    for part in (slice(0, 16), slice(16, 40)):
        batch = {"image": torch.zeros(len(labels[part]), 3), "label": labels[part]}
        one.update_metrics(batch, logits[part])
    found = {name: float(value) for name, value in one.compute_metrics().items()}
    scores, truth = logits.sigmoid().numpy(), labels.numpy()
    guesses = scores >= 0.4
    known = range(3)
    expected = {
        "mAP": 100 * np.mean([average_precision_score(truth[:, k], scores[:, k]) for k in known]),
        "F1": 100 * np.mean([f1_score(truth[:, k], guesses[:, k]) for k in known]),
        "F1_micro": 100 * f1_score(truth, guesses, average="micro", zero_division=0),
        "exact": 100 * (truth == guesses).all(1).mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert one.class_figures[3] == {"class": "owl", "AP": None, "F1": None}
    assert set(one.metric_names) == set(expected)


def test_labels_of_another_form_are_refused():
    batch = {"image": torch.zeros(2, 3, 8, 8), "label": torch.tensor([1, 2])}
    with pytest.raises(
        ValueError, match=r"the shape \(2,\); expected \(2, 4\) with 1 for each label"
    ):
        task().prepare_batch(batch)
    with pytest.raises(ValueError, match="expected"):
        task().prepare_batch(batch | {"label": torch.full((2, 4), 0.5)})
    data = SampleMultiLabel(num_train=4, num_val=2)
    model = LinearClassifier(create_backbone("resnet18", img_size=64), 10)
    with pytest.raises(ValueError, match=r"any number of labels; pass task=multi_label"):
        ClassificationTask(model, [*map(str, range(10))]).take_targets(data)
    data.labels = None
    with pytest.raises(ValueError, match=r"pass data.labels=<csv file>"):
        task().take_targets(data)
    with pytest.raises(ValueError, match=r"task.threshold must be between 0 and 1"):
        task(threshold=1.0)


def test_a_plain_trainer_and_its_checkpoint(tmp_path):
    samples = [
        {"image": torch.randn(3, 64, 64), "label": torch.tensor([1.0, i % 2, 0, 1])}
        for i in range(4)
    ]
    one = task(loss={"name": "asymmetric"}, threshold=0.3)
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    loader = DataLoader(samples, batch_size=2)
    trainer.fit(one, loader, loader)
    assert trainer.callback_metrics.keys() >= {"val/mAP", "val/F1", "val/loss"}
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    opened = tasks.load(tmp_path / "a.ckpt")
    assert isinstance(opened, MultiLabelTask)
    assert (opened.threshold, opened.label_loss.name) == (0.3, "asymmetric")
    rows = opened.predict([torch.rand(3, 64, 64)], out=tmp_path / "out")
    (row,) = rows
    assert [*row["scores"]] == NAMES
    assert row["classes"] == sorted(
        (name for name, share in row["scores"].items() if share >= 0.3),
        key=lambda name: -row["scores"][name],
    )
    (line,) = csv.DictReader((tmp_path / "out/predictions.csv").open())
    assert line["labels"].split(";") == row["classes"] or not row["classes"]
    assert [*line] == ["input", "labels", *NAMES]


def test_mixup_mixes_the_labels_of_two_images_in_the_same_proportion():
    one = task(mixup={"mixup_alpha": 1.0, "cutmix_alpha": 0.0, "label_smoothing": 0.0})
    labels = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 1]])
    images = torch.stack([torch.zeros(3, 64, 64), torch.ones(3, 64, 64)])
    mixed = one.prepare_batch({"image": images, "label": labels})
    share = 1 - float(mixed["image"][0, 0, 0, 0])
    assert 0 < share < 1
    torch.testing.assert_close(mixed["label"], share * labels + (1 - share) * labels.flip(0))
    losses = one.train().model.loss(mixed)
    assert all(value.isfinite() for value in losses.values())
    with pytest.raises(ValueError, match=r"takes whole labels, which mixup mixes: pass task.mixup"):
        task(mixup={"mixup_alpha": 1.0}, loss={"name": "asymmetric"})
    with pytest.raises(ValueError, match=r"task.mixup.multi_label follows from the task"):
        task(mixup={"multi_label": True})
