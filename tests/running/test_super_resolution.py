"""Runs of task=super_resolution: averaged, resumed, compiled, and in two processes."""

import json

import pytest

from tests.runs import completed

pytestmark = pytest.mark.slow


def words(folder, *more, backbone="edsr_baseline"):
    """Two steps an epoch on patches of 8 pixels."""
    return [
        "task=super_resolution", f"backbone={backbone}", "trainer=cpu", "logger=csv",
        "data.scale=2", "data.patch_size=8", "data.patches_per_image=1", "data.batch_size=4",
        "trainer.max_epochs=1", "trainer.limit_val_batches=3", "schedule.name=constant",
        "schedule.warmup=0", f"output_dir={folder}", *more,
    ]  # fmt: skip


def figures(folder):
    return json.loads((folder / "summary.json").read_text())["metrics"]


def test_a_compiled_run_learns_the_same(tmp_path, capsys):
    compiled, plain = (
        figures(completed(words(tmp_path / word, f"trainer.compile={word}"), capsys).folder())
        for word in ("true", "false")
    )
    assert compiled["psnr"] == pytest.approx(plain["psnr"], abs=0.05)
