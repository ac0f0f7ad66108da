"""Runs of task=forecasting: trained, tested, resumed, exported, and forecasting from a csv."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import tasks
from backbones import create_backbone
from datamodules.series.sample import write_series
from heads.forecasting import Forecaster
from tasks.forecasting.task import ForecastingTask
from tests.runs import ROOT, composed, run_here, run_shared, summary
from tools.export import export

NETWORK = ("backbone.dim=8", "backbone.expansion=2")
SERIES_HOSTS = (
    "last_value", "seasonal_naive", "nlinear", "dlinear", "patchtst", "itransformer",
)  # fmt: skip
TINY = ("data.hours=600", "data.lookback=24", "data.horizon=12", "data.batch_size=64")


def words(folder, *more, backbone="ffnet_1d"):
    own = NETWORK if backbone.startswith("ffnet_1d") else ()
    usual = ("trainer=cpu", "logger=csv", *TINY, "trainer.max_epochs=1")
    return ["task=forecasting", f"backbone={backbone}", *own, *usual, f"output_dir={folder}", *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    ended = run_shared(words(tmp_path_factory.mktemp("runs")))
    assert ended.status == 0, ended.err
    return ended


def test_a_run_ends_with_errors_by_horizon_and_curves(trained):
    folder = trained.folder()
    found = summary(folder)
    assert {"mse", "mae", "loss"} == found["metrics"].keys()
    assert found["macs_at"] == [24, 7]
    assert found["data"]["samples"] == {"train": 385, "val": 49, "test": 109}
    assert found["data"]["variables"] == 7
    assert "steps of the horizon" in trained.out
    rows = list(csv.DictReader((folder / "horizon.csv").open()))
    assert [row["step"] for row in rows] == [str(step + 1) for step in range(12)]
    mean = np.mean([float(row["mse"]) for row in rows])
    np.testing.assert_allclose(mean, found["metrics"]["mse"], rtol=1e-5)
    pictures = sorted((folder / "preview").glob("*.png"))
    assert len(pictures) == 4
    assert Image.open(pictures[0]).size[0] > 600


@pytest.mark.slow
def test_its_test_is_repeated_with_any_batch_size(trained, tmp_path, capsys):
    typed = ["mode=test", f"ckpt={trained.folder()}", f"output_dir={tmp_path}"]
    ended = run_here([*typed, "data.eval_batch_size=7"], capsys)
    assert ended.status == 0, ended.err
    again = summary(ended.folder())["metrics"]
    for name, value in summary(trained.folder())["metrics"].items():
        assert again[name] == pytest.approx(value, rel=1e-5)


def test_it_forecasts_beyond_the_end_of_a_csv(trained, tmp_path, capsys):
    write_series(tmp_path / "later.csv", 100, seed=3)
    typed = ["mode=predict", f"ckpt={trained.folder()}", f"output_dir={tmp_path}"]
    ended = run_here([*typed, f"input={tmp_path / 'later.csv'}"], capsys)
    assert ended.status == 0, ended.err
    folder = ended.folder()
    rows = list(csv.DictReader((folder / "forecast.csv").open()))
    assert len(rows) == 12
    assert rows[0]["date"] == "2024-01-05 04:00:00"
    assert (folder / "preview" / "00.png").is_file()
    (row,) = json.loads((folder / "predictions.json").read_text())
    assert float(rows[3]["OT"]) == row["forecast"]["OT"][3]
    (same,) = tasks.load(trained.folder()).predict(tmp_path / "later.csv")
    np.testing.assert_allclose(same["forecast"]["OT"], row["forecast"]["OT"], rtol=1e-4)
    pandas = pytest.importorskip("pandas")
    (same,) = tasks.load(trained.folder()).predict(pandas.read_csv(tmp_path / "later.csv"))
    assert same["input"] == "table 1"
    np.testing.assert_allclose(same["forecast"]["OT"], row["forecast"]["OT"], rtol=1e-4)


def test_the_published_recipe_depends_on_data_and_horizon():
    found = composed("task=forecasting", "recipe=ffnet_1d", "data=etth2", "data.root=/d",
                     "data.horizon=720")  # fmt: skip
    assert (found.backbone["expansion"], found.backbone["drop"]) == (8, 0.85)
    assert (found.head["drop"], found.data["batch_size"]) == (0.5, 512)
    assert found.callbacks["early_stopping"]["patience"] == 5
    assert found.task["onecycle_side_effect"] is True
    found = composed("task=forecasting", "recipe=ffnet_1d", "data=traffic", "data.root=/d")
    assert (found.backbone["expansion"], found.backbone["drop"]) == (12, 0.9)
    assert (found.optimizer["lr"], found.data["batch_size"]) == (5e-5, 128)


def test_rates_of_the_librarys_recipe_halve_from_the_third_epoch_on():
    found = composed("task=forecasting", "recipe=time_series_library", "data=etth1",
                     "data.root=/d", "backbone=dlinear")  # fmt: skip
    network = Forecaster(create_backbone("dlinear", img_size=96), 96, 7)
    task = ForecastingTask(network, optimizer=found.optimizer, schedule=found.schedule)
    factor = task.schedule_factor(10 * 5, 5, found.optimizer["lr"])
    assert [factor(5 * epoch) for epoch in range(4)] == [1, 1, 0.5, 0.25]
    assert found.callbacks["early_stopping"]["patience"] == 3
    assert (found.trainer["max_epochs"], found.data["batch_size"]) == (10, 32)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [*SERIES_HOSTS, "ffnet_1d_afbo", "patchtst_convglu"])
def test_every_baseline_runs_by_the_same_command(backbone, tmp_path, capsys):
    ended = run_here(words(tmp_path, backbone=backbone), capsys)
    assert ended.status == 0, ended.err
    assert summary(ended.folder())["metrics"]["mse"] > 0
    typed = ["mode=predict", f"ckpt={ended.folder()}", f"output_dir={tmp_path / 'predicted'}"]
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    assert (ended.folder() / "forecast.csv").is_file()


@pytest.mark.slow
def test_a_baseline_without_weights_is_tested_without_a_checkpoint(tmp_path, capsys):
    ended = run_here([*words(tmp_path, backbone="last_value"), "mode=test"], capsys)
    assert ended.status == 0, ended.err
    assert summary(ended.folder())["metrics"]["mse"] > 0


def test_quantiles_are_an_option(tmp_path, capsys):
    ended = run_here(words(tmp_path, "head.quantiles=[0.1,0.5,0.9]"), capsys)
    assert ended.status == 0, ended.err
    assert {"mse", "mae", "pinball", "coverage"} <= summary(ended.folder())["metrics"].keys()
    typed = ["mode=predict", f"ckpt={ended.folder()}", f"output_dir={tmp_path / 'predicted'}"]
    rows = list(csv.DictReader((run_here(typed, capsys).folder() / "forecast.csv").open()))
    assert float(rows[0]["OT_q0.1"]) <= float(rows[0]["OT"]) <= float(rows[0]["OT_q0.9"])


@pytest.mark.slow
def test_a_sweep_over_horizons_prints_the_average(tmp_path):
    typed = [*words(tmp_path, backbone="nlinear"), "data.horizon=6,12", "--multirun"]
    ended = subprocess.run(
        [sys.executable, "tools/run.py", *typed], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = [summary(path.parent) for path in tmp_path.rglob("summary.json")]
    mean = np.mean([one["metrics"]["mse"] for one in found])
    line = next(line for line in ended.stdout.splitlines() if "6, 12" in line)
    assert f"{mean:.4g}" in line


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch_export"])
@pytest.mark.parametrize("backbone", ["ffnet_1d", "itransformer", "dlinear"])
def test_whole_networks_are_exported(backbone, to, tmp_path, capsys):
    ended = run_here(words(tmp_path, backbone=backbone), capsys)
    files = export(
        [f"to={to}", "what=both", f"ckpt={ended.folder()}", f"out={tmp_path / 'exported'}"]
    )
    readme = next(file for file in files if file.name == "README.md").read_text()
    assert ("batch and variables" in readme) == (backbone != "ffnet_1d")
