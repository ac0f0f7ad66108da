"""python tools/run.py from the command to the run folder: the four tasks, modes, resume, errors."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import sys
import time

import pytest
import torch
import yaml
from PIL import Image

from tasks.loggers import read_rows
from tests.runs import ROOT, TINY, arguments, command, run_here, start
from tools import command_line, report, run_folder

pytestmark = pytest.mark.usefixtures("sample_cache")

TASKS = tuple(TINY)
METRICS = {
    "classification": {"top1", "top5"},
    "transfer": {"top1", "top5"},
    "detection": {"AP", "AP50", "AP75", "mask_AP", "mask_AP50", "mask_AP75"},
    "segmentation": {"mIoU", "mAcc", "aAcc"},
}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def weights(folder, name="last"):
    path = folder / "checkpoints" / f"{name}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="session")
def trained(outputs, sample_cache):
    """task -> how its run ended; each is trained once, by the real command."""
    runs = {}

    def train(task):
        if task not in runs:
            more = []
            if task == "transfer":
                train("classification")
                more = [f"backbone.pretrained={outputs}/classification/deit_t/latest"]
            runs[task] = command(arguments(task, outputs, *more, epochs=2))
        return runs[task]

    return train


@pytest.mark.parametrize("task", TASKS)
def test_plain_command_trains_and_leaves_everything(task, trained, outputs):
    ended = trained(task)
    assert (ended.status, ended.err) == (0, "")
    folder = ended.folder()
    assert folder == (outputs / task / "deit_t" / "latest").resolve()
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "summary.json", "curves.png",
        "preview",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    events = [path.name for path in (folder / "tensorboard").iterdir()]
    assert len(events) == 1
    assert events[0].startswith("events.out.tfevents")
    with Image.open(folder / "curves.png") as curves:
        assert curves.width > 500
    assert len(list((folder / "preview").glob("*.png"))) in range(1, 13)

    facts = summary(folder)
    assert facts["metrics"].keys() >= METRICS[task]
    assert facts["parameters"] >= facts["backbone_parameters"] > 5e6
    assert facts["backbone_macs"] > 1e7
    assert facts["seed"] == 0
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    rows = read_rows(folder / "metrics.csv")
    monitored = max(METRICS[task], key=lambda name: name in ("top1", "AP50", "mIoU"))
    assert sum(f"val/{monitored}" in row for row in rows) == 2
    assert all(torch.tensor(row["train/loss"]).isfinite() for row in rows if "train/loss" in row)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["backbone"]["name"] == "deit_t"
    assert "${" not in (folder / "config.yaml").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_a_run_prints_what_it_does_and_nothing_else(task, trained):
    lines = trained(task).out.splitlines()
    patterns = [
        "Generating the sample data .*", "Sample data in .*; for a real dataset pass .*",
        ".* tensors loaded, .*", f"{task} with deit_t: .* M parameters, .* images .*, 2 epochs",
        ".* classes do not occur in validation: .*",
        r"epoch [12]/2  train/loss [\d.]+  val/.* \(\d+ s\)", f"{task}, deit_t, fit *",
        "[┌└]─.*[┐┘]", "│ .* │ .* │", "Run folder: .*",
    ]  # fmt: skip
    strange = [line for line in lines if not any(re.fullmatch(p, line) for p in patterns)]
    assert not strange
    assert len([line for line in lines if line.startswith("epoch")]) == 2


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_of_the_run_folder_gives_the_metrics_of_its_best_checkpoint(
    task, trained, tmp_path, capsys, one_thread
):
    folder = trained(task).folder()
    for mode, ckpt in (("validate", folder), ("test", folder / "checkpoints" / "best.ckpt")):
        ended = run_here(arguments(task, tmp_path, f"mode={mode}", f"ckpt={ckpt}"), capsys)
        assert ended.status == 0, ended.err
        assert ended.folder().name.endswith(f"_{mode}")
        assert summary(ended.folder())["metrics"] == summary(folder)["metrics"]
        assert not (ended.folder() / "metrics.csv").exists()
    assert not (tmp_path / task / "deit_t" / "latest").exists()


@pytest.mark.parametrize("task", TASKS)
def test_prediction_of_images_and_of_the_validation_set(task, trained, tmp_path, capsys):
    folder = trained(task).folder()
    images = tmp_path / "images"
    images.mkdir()
    for name, size in (("b.png", (90, 70)), ("a.jpg", (64, 64))):
        Image.effect_mandelbrot(size, (-2, -1, 1, 1), 30).convert("RGB").save(images / name)
    base = arguments(task, tmp_path, "mode=predict", f"ckpt={folder}")

    ended = run_here([*base, f"input={images}"], capsys)
    rows = json.loads((ended.folder() / "predictions.json").read_text())
    assert [row["image"] for row in rows] == [str(images / "a.jpg"), str(images / "b.png")]
    assert all(len(row) > 1 for row in rows)
    assert list((ended.folder() / "preview").glob("*.png"))

    ended = run_here([*base, f"input={images / 'b.png'}"], capsys)
    assert len(json.loads((ended.folder() / "predictions.json").read_text())) == 1


def test_prediction_without_input_takes_the_validation_images(trained, tmp_path, capsys):
    folder = trained("detection").folder()
    base = arguments("detection", tmp_path, "mode=predict", f"ckpt={folder}")
    rows = json.loads((run_here(base, capsys).folder() / "predictions.json").read_text())
    assert len(rows) == 3
    detection = rows[0]["detections"][0]
    assert detection.keys() == {"bbox", "score", "class", "segmentation"}


def test_two_processes_evaluate_like_one(outputs, tmp_path, capsys, one_thread):
    typed = arguments("segmentation", tmp_path, trainer="ddp_cpu", backbone="poolformer_s12")
    ended = command(typed)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("Run folder") == ended.out.count("epoch 1/1") == 1
    folder = ended.folder()
    assert len(list(folder.parent.iterdir())) == 2  # the run and the link to it
    typed = arguments("segmentation", tmp_path, "mode=validate", f"ckpt={folder}",
                      backbone="poolformer_s12")  # fmt: skip
    alone = run_here(typed, capsys)
    assert summary(alone.folder())["metrics"] == pytest.approx(summary(folder)["metrics"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_in_two_processes_and_is_evaluated_alike(task, tmp_path, capsys):
    more = ["backbone.pretrained=false"] if task == "transfer" else []
    ended = command(arguments(task, tmp_path, *more, trainer="ddp_cpu"))
    assert (ended.status, ended.err) == (0, "")
    evaluation = ["mode=validate", f"ckpt={ended.folder()}"]
    alone = run_here(arguments(task, tmp_path, *evaluation), capsys)
    two = command(arguments(task, tmp_path, *evaluation, trainer="ddp_cpu"))
    assert summary(two.folder())["metrics"] == summary(alone.folder())["metrics"]
    assert summary(two.folder())["metrics"] == summary(ended.folder())["metrics"]


def wait_for(process, condition):
    """Wait until something is there that the process is to write."""
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_run_that_is_stopped_and_killed_ends_as_if_it_was_not(tmp_path, capsys, one_thread):
    """SIGTERM within the first epoch, kill -9 after it: each time resume=true goes on exactly."""
    # Long enough that the signals arrive in time; drop path draws from the global generator.
    long = ["++data.train_copies=8", "backbone.drop_path_rate=0.2", "trainer.log_every_n_steps=1"]
    whole = run_here(arguments("classification", tmp_path / "whole", *long, epochs=2), capsys)
    parent = tmp_path / "broken" / "classification" / "deit_t"
    typed = arguments("classification", tmp_path / "broken", *long, epochs=2)

    process = start(typed)
    wait_for(process, lambda: list(parent.glob("2*/tensorboard/*")))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert re.search(r"Stopped after step \d+; with resume=true", out)

    process = start([*typed, "resume=true"])
    best = parent / "latest" / "checkpoints" / "best.ckpt"
    wait_for(process, lambda: best.is_file() and "val/top1" in weights_step(parent / "latest"))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (parent / "latest" / "summary.json").exists()

    ended = run_here([*typed, "resume=true"], capsys)
    assert ended.status == 0, ended.err
    assert len(list(parent.iterdir())) == 2  # one run and the link to it
    assert same(weights(ended.folder()), weights(whole.folder()))
    assert same(weights(ended.folder(), "best"), weights(whole.folder(), "best"))
    assert summary(ended.folder())["metrics"] == summary(whole.folder())["metrics"]
    rows, expected = (read_rows(run.folder() / "metrics.csv") for run in (ended, whole))
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert rows == [row for row in expected if row["step"] in steps]
    assert len(rows) >= len(expected) - 1  # the step of the SIGTERM goes unlogged

    again = run_here([*typed, "resume=true"], capsys)
    assert again.status == 0
