"""Calibration of classifiers: figures against plain sums, and the fitted temperature."""

import csv
import math

import pytest
import torch
import torch.nn.functional as F

import tasks
from tasks.classification.calibration import Calibration, TemperatureFit
from tests.runs import arguments, completed, summary


def drawn(count, temperature=1.0, seed=0):
    """Return logits whose softmax at the temperature is the distribution of the labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 5, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return logits, labels


def test_figures_equal_plain_sums():
    logits, labels = drawn(500)
    ours = Calibration(5, 1.7)
    for part in range(0, 500, 130):
        ours.update(logits[part : part + 130], labels[part : part + 130])
    ours.update(logits[:3], torch.full((3,), -1))  # images without a label
    shares = (logits / 1.7).softmax(-1).double()
    sure, best = shares.max(-1)
    error = 0.0
    for i in range(15):
        inside = (sure > i / 15) & (sure <= (i + 1) / 15)
        if inside.any():
            right = (best[inside] == labels[inside]).double().mean()
            error += float(inside.double().mean() * (right - sure[inside].mean()).abs())
    found = ours.compute()
    assert found["ece"].item() == pytest.approx(error, abs=1e-6)
    truth = torch.eye(5, dtype=torch.float64)[labels]
    assert found["brier"].item() == pytest.approx((shares - truth).pow(2).sum(1).mean().item())
    likely = -shares[torch.arange(500), labels].log().mean()
    assert found["nll"].item() == pytest.approx(likely.item(), rel=1e-6)
    ours.reset()
    ours.update(logits[:100], labels[:100])
    assert ours.compute()["nll"] != found["nll"]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_of_the_labels_is_found(temperature):
    fit = TemperatureFit()
    logits, labels = drawn(20_000, temperature)
    fit.update(logits[:9_000], labels[:9_000])
    fit.update(logits[9_000:], labels[9_000:])
    found = fit.compute().item()
    assert found == pytest.approx(temperature, rel=0.05)
    # The derivative of the likelihood vanishes there.
    at = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(logits.double() / at, labels).backward()
    assert abs(at.grad) < 1e-4
    assert TemperatureFit().compute() == 1
    right = TemperatureFit()
    right.update(logits, logits.argmax(1))
    assert right.compute() == 1


@pytest.mark.usefixtures("sample_cache")
def test_a_run_keeps_its_temperature(tmp_path, capsys):
    typed = arguments("classification", tmp_path, "task.calibrate=true", "logger=csv", epochs=2)
    folder = completed(typed, capsys).folder()
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    fitted = [float(row["val/temperature"]) for row in rows if row.get("val/temperature")]
    task = tasks.load(folder)
    assert len(fitted) == 2
    assert any(task.temperature == pytest.approx(one, rel=1e-6) for one in fitted)
    assert task.temperature != 1
    image = torch.rand(3, 64, 64)
    scaled = task.predict(image)[0]["probabilities"]
    task.temperature = 1.0
    plain = task.predict(image)[0]["probabilities"]
    assert scaled != plain
    ended = completed(["mode=test", f"ckpt={folder}", f"output_dir={tmp_path}"], capsys)
    metrics = summary(ended.folder())["metrics"]
    assert {"top1", "ece", "brier", "nll", "scaled_ece", "scaled_brier", "scaled_nll"} <= {*metrics}
    assert metrics["scaled_nll"] <= metrics["nll"] + 1e-4  # the sample's test images are val's
    assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert 0 <= metrics["ece"] <= 1
    assert math.isfinite(metrics["scaled_brier"])
