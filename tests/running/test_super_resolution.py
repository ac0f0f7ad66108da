"""Runs of task=super_resolution: averaged, resumed, compiled, and in two processes."""

import json
import subprocess
import sys

import pytest
import torch

from tests.runs import ROOT, completed

pytestmark = pytest.mark.slow


def words(folder, *more, backbone="edsr_baseline"):
    """Two steps an epoch on patches of 8 pixels."""
    return [
        "task=super_resolution", f"backbone={backbone}", "trainer=cpu", "logger=csv",
        "data.scale=2", "data.patch_size=8", "data.patches_per_image=1", "data.batch_size=4",
        "trainer.max_epochs=1", "trainer.limit_val_batches=3", "schedule.name=constant",
        "schedule.warmup=0", f"output_dir={folder}", *more,
    ]  # fmt: skip


def last(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)


def figures(folder):
    return json.loads((folder / "summary.json").read_text())["metrics"]


def test_a_longer_run_continues_a_shorter_one(tmp_path, capsys):
    """Weights and their average after two epochs are those of one epoch that was resumed."""
    more = ("trainer.max_epochs=2", "task.ema={decay: 0.9}")
    long = completed(words(tmp_path / "a", *more), capsys).folder()
    short = completed(words(tmp_path / "b", more[1]), capsys).folder()
    typed = words(tmp_path / "b", *more, "resume=true", f"ckpt={short}")
    resumed = completed(typed, capsys).folder()
    one, other = (last(folder) for folder in (long, resumed))
    assert one["global_step"] == other["global_step"] == 4
    for part in (key for key in one if key.startswith("state_dict")):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][key]) for key, value in one[part].items()), part
    assert any(key.startswith("state_dict_ema") for key in one)


def test_a_compiled_run_learns_the_same(tmp_path, capsys):
    compiled, plain = (
        figures(completed(words(tmp_path / word, f"trainer.compile={word}"), capsys).folder())
        for word in ("true", "false")
    )
    assert compiled["psnr"] == pytest.approx(plain["psnr"], abs=0.05)


def test_two_processes_measure_the_same_as_one(tmp_path, capsys):
    """The figures of both processes are those over all images, an odd number of them."""
    typed = words(tmp_path, "trainer=ddp_cpu", "trainer.devices=2", "trainer.limit_val_batches=1.0")
    ended = subprocess.run(
        [sys.executable, "tools/run.py", *typed], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    folder = ROOT / ended.stdout.strip().splitlines()[-1].removeprefix("Run folder: ")
    typed = ["mode=test", f"ckpt={folder}", "trainer=cpu", f"output_dir={tmp_path / 'alone'}"]
    tested = completed(typed, capsys).folder()
    found, alone = figures(folder), figures(tested)
    assert alone["psnr"] == pytest.approx(found["psnr"], rel=1e-5)
    assert alone["ssim"] == pytest.approx(found["ssim"], rel=1e-5)
