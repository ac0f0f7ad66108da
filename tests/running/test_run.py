"""tools/run.py from the command to the run folder: the four tasks and modes."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from tasks.engine.callbacks.loggers import read_rows
from tests.families import by_turns, rest_slow_pairs
from tests.runs import ROOT, TINY, arguments, command, completed, summary

pytestmark = pytest.mark.usefixtures("sample_cache")

TASKS = tuple(TINY)
EVALUATIONS = [
    ("classification", "test", "checkpoints/best.ckpt"), ("transfer", "validate", ""),
    ("detection", "validate", "checkpoints/best.ckpt"), ("segmentation", "test", ""),
]  # fmt: skip
METRICS = {
    "classification": {"top1", "top5", "balanced_accuracy", "F1"},
    "transfer": {"top1", "top5", "balanced_accuracy", "F1"},
    "detection": {"AP", "AP50", "AP75", "mask_AP", "mask_AP50", "mask_AP75"},
    "segmentation": {"mIoU", "mAcc", "aAcc"},
}
IN_TESTS = ("ece", "brier", "nll")  # a training ends with a test


@pytest.mark.parametrize("task", TASKS)
def test_plain_command_trains_and_writes_all_files(task, trained, outputs):
    ended = trained(task)
    assert (ended.status, ended.err) == (0, "")
    folder = ended.folder()
    assert folder == (outputs / task / "deit_t" / "latest").resolve()
    # A checkout with changes leaves them in a folder "source".
    assert {path.name for path in folder.iterdir()} - {"source"} == {
        "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "summary.json", "curves.png",
        "preview", "classes.csv", "answers.npz",
    }  # fmt: skip
    assert {path.name for path in folder.glob("checkpoints/*")} == {"best.ckpt", "last.ckpt"}
    (events,) = (folder / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")
    with Image.open(folder / "curves.png") as curves:
        assert curves.width > 500
    assert len(list((folder / "preview").glob("*.png"))) in range(1, 13)

    text = (folder / "config.yaml").read_text()
    assert "${" not in text
    config = yaml.safe_load(text)
    assert config["backbone"]["name"] == "deit_t"
    facts, rows = summary(folder), read_rows(folder / "metrics.csv")
    assert facts["metrics"].keys() >= METRICS[task]
    assert facts["parameters"] >= facts["backbone_parameters"] > 5e6
    assert facts["backbone_macs"] > 1e7
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert Path(facts["data"]["root"]).is_dir()
    assert facts["data"]["samples"]["train"] > 0 < facts["data"]["samples"]["val"]
    assert f"task={task}" in facts["overrides"]
    assert (facts["precision"], facts["processes"], facts["seed"]) == ("32-true", 1, 0)
    assert facts["device"]
    assert facts["peak_memory_mib"] > 100
    assert facts["samples_per_second"] > 0
    assert facts["global_batch"] == config["data"]["batch_size"]
    assert facts["checkpoint_step"] in (row["step"] + 1 for row in rows)
    monitored = max(METRICS[task], key=lambda name: name in ("top1", "AP50", "mIoU"))
    assert sum(f"val/{monitored}" in row for row in rows) == 2
    assert all(torch.tensor(row["train/loss"]).isfinite() for row in rows if "train/loss" in row)

    patterns = [
        "Files checked: .*", "Generating the sample data .*",
        "Sample data in .*; for a real dataset pass .*",
        ".* tensors loaded, .*", f"{task} with deit_t: .* M parameters, .* images .*, 2 epochs",
        ".* classes do not occur in validation: .*",
        r"epoch [12]/2  train/loss [\d.]+  val/.* \(\d+ s\)", f"{task}, deit_t, fit *",
        r"learning rate \S+ for any batch \(batch \d+ on 1 device; no reference batch\)",
        "[┌└]─.*[┐┘]", "│ .* │ .* │", "Run folder: .*",
    ]  # fmt: skip
    lines = ended.out.splitlines()
    assert not [line for line in lines if not any(re.fullmatch(p, line) for p in patterns)]
    assert sum(line.startswith("epoch") for line in lines) == 2


@pytest.mark.parametrize(("task", "mode", "ckpt"), rest_slow_pairs(EVALUATIONS, EVALUATIONS[:1]))
def test_evaluation_of_a_run_reproduces_its_best_metrics(
    task, mode, ckpt, trained, tmp_path, capsys, one_thread
):
    folder = trained(task).folder()
    typed = [f"mode={mode}", f"ckpt={folder / ckpt}", f"output_dir={tmp_path}", "trainer=cpu"]
    ended = completed(typed, capsys)
    assert ended.folder().name.endswith(f"_{mode}")
    assert in_mode(ended.folder(), mode) == in_mode(folder, mode)
    assert not (ended.folder() / "metrics.csv").exists()
    assert not (tmp_path / task / "deit_t" / "latest").exists()


def test_a_detector_of_masks_trains_in_a_fresh_process(tmp_path):
    """Other tests run in this process, which has imported everything."""
    ended = command(arguments("detection", tmp_path))
    assert (ended.status, ended.err) == (0, "")


def test_data_of_toolkits_need_the_operators():
    code = "from datamodules.dense.toolkit_data import require_package as f; f('mmdet.datasets')"
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "put `import heads` first, which provides mmcv's operators" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_in_two_processes_and_is_evaluated_alike(task, tmp_path, capsys):
    more = ["backbone.pretrained=false"] if task == "transfer" else []
    ended = command(arguments(task, tmp_path, *more, trainer="ddp_cpu"))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("Run folder") == ended.out.count("epoch 1/1") == 1
    assert len(list(ended.folder().parent.iterdir())) == 2  # the run and the link to it
    if task == "segmentation":
        assert "6 training images in batches of 4 (2 processes x 2), 1 epoch" in ended.out
    last = torch.load(ended.folder() / "checkpoints" / "last.ckpt", weights_only=True)
    first, second = last["random_state"]
    for name in ("torch", "python", "numpy"):
        assert str(first[name]) != str(second[name]), name
    evaluation = ["mode=validate", f"ckpt={ended.folder()}"]
    alone = completed(arguments(task, tmp_path, *evaluation), capsys)
    if task in ("classification", "transfer"):  # of 40 and 100 images, one process has one more
        evaluation += ["trainer.devices=3", "data.eval_batch_size=8"]
    several = command(arguments(task, tmp_path, *evaluation, trainer="ddp_cpu"))
    assert (several.status, several.err) == (0, "")
    # Losses are sums of single precision over each process's batches.
    found = in_mode(several.folder(), "validate")
    assert found == pytest.approx(in_mode(alone.folder(), "validate"), rel=1e-6)
    assert found == pytest.approx(in_mode(ended.folder(), "validate"), rel=1e-6)


def in_mode(folder, mode):
    """The metrics of a run that an evaluation in a mode has, too."""
    left_out = IN_TESTS if mode == "validate" else ()
    found = summary(folder)["metrics"]
    return {name: value for name, value in found.items() if name not in left_out}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), by_turns(*TASKS))
def test_every_host_and_mixer_trains_a_step_of_every_task(name, task, tmp_path, capsys):
    # Two images, since a step of the largest network with the usual 16 takes 20 GB.
    more = ["trainer.fast_dev_run=true", "backbone.pretrained=false", "data.batch_size=2"]
    ended = completed(
        arguments(task, tmp_path, *more, "data.eval_batch_size=2", backbone=name), capsys
    )
    facts = summary(ended.folder())
    model = "vit_tiny_patch16_224_"  # the default of timm's host
    assert facts["backbone"] == name.replace("timm_", f"timm_{model}", 1)
    assert facts["metrics"].keys() >= METRICS[task] - {"AP75", "mask_AP75"}
