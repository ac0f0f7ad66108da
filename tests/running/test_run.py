"""tools/run.py from the command to the run folder: the four tasks and modes."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from datamodules import SampleClassification
from tasks.engine.loggers import read_rows
from tests.families import by_turns
from tests.runs import TINY, arguments, command, run_here, same, summary

pytestmark = pytest.mark.usefixtures("sample_cache")

TASKS = tuple(TINY)
METRICS = {
    "classification": {"top1", "top5"},
    "transfer": {"top1", "top5"},
    "detection": {"AP", "AP50", "AP75", "mask_AP", "mask_AP50", "mask_AP75"},
    "segmentation": {"mIoU", "mAcc", "aAcc"},
}


@pytest.mark.parametrize("task", TASKS)
def test_plain_command_trains_and_writes_all_files(task, trained, outputs):
    ended = trained(task)
    assert (ended.status, ended.err) == (0, "")
    folder = ended.folder()
    assert folder == (outputs / task / "deit_t" / "latest").resolve()
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "summary.json", "curves.png",
        "preview", *(["classes.csv"] if task in ("detection", "segmentation") else []),
    }  # fmt: skip
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"best.ckpt", "last.ckpt"}
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
    assert Path(facts["data"]["root"]).is_dir()
    assert facts["data"]["images"]["train"] > 0 < facts["data"]["images"]["val"]
    assert f"task={task}" in facts["overrides"]
    assert (facts["precision"], facts["processes"]) == ("32-true", 1)
    assert facts["device"]
    assert facts["peak_memory_mib"] > 100
    assert facts["images_per_second"] > 0
    batch = yaml.safe_load((folder / "config.yaml").read_text())["data"]["batch_size"]
    assert facts["global_batch"] == batch
    assert facts["checkpoint_step"] in (s["step"] + 1 for s in read_rows(folder / "metrics.csv"))
    rows = read_rows(folder / "metrics.csv")
    monitored = max(METRICS[task], key=lambda name: name in ("top1", "AP50", "mIoU"))
    assert sum(f"val/{monitored}" in row for row in rows) == 2
    assert all(torch.tensor(row["train/loss"]).isfinite() for row in rows if "train/loss" in row)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["backbone"]["name"] == "deit_t"
    assert "${" not in (folder / "config.yaml").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_output_of_a_run(task, trained):
    lines = trained(task).out.splitlines()
    patterns = [
        "Files checked: .*", "Generating the sample data .*",
        "Sample data in .*; for a real dataset pass .*",
        ".* tensors loaded, .*", f"{task} with deit_t: .* M parameters, .* images .*, 2 epochs",
        ".* classes do not occur in validation: .*",
        r"epoch [12]/2  train/loss [\d.]+  val/.* \(\d+ s\)", f"{task}, deit_t, fit *",
        r"learning rate \S+ for any batch \(batch \d+ on 1 device; no reference batch\)",
        "[┌└]─.*[┐┘]", "│ .* │ .* │", "Run folder: .*",
    ]  # fmt: skip
    strange = [line for line in lines if not any(re.fullmatch(p, line) for p in patterns)]
    assert not strange
    assert len([line for line in lines if line.startswith("epoch")]) == 2


@pytest.mark.parametrize(
    ("task", "mode", "ckpt"),
    [
        ("classification", "test", "checkpoints/best.ckpt"),
        pytest.param("transfer", "validate", "", marks=pytest.mark.slow),
        pytest.param("detection", "validate", "checkpoints/best.ckpt", marks=pytest.mark.slow),
        pytest.param("segmentation", "test", "", marks=pytest.mark.slow),
    ],
)
def test_evaluation_of_a_run_reproduces_its_best_metrics(
    task, mode, ckpt, trained, tmp_path, capsys, one_thread
):
    folder = trained(task).folder()
    typed = [f"mode={mode}", f"ckpt={folder / ckpt}", f"output_dir={tmp_path}", "trainer=cpu"]
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    assert ended.folder().name.endswith(f"_{mode}")
    assert summary(ended.folder())["metrics"] == summary(folder)["metrics"]
    assert not (ended.folder() / "metrics.csv").exists()
    assert not (tmp_path / task / "deit_t" / "latest").exists()


@pytest.mark.slow
def test_a_papers_recipe_on_class_folders(sample_cache, tmp_path, capsys, one_thread):
    """DeiT's recipe: repeated augmentation, mixup and an average, which evaluation restores."""
    data = SampleClassification(sample_cache, digits_per_class=4, train_copies=1, num_workers=0)
    data.prepare_data()
    data.setup()
    typed = [
        "data=imagenet", f"data.root={data.folder}", "recipe=deit", "trainer=cpu",
        "data.image_size=64", "data.batch_size=8", "data.num_workers=0", "trainer.max_epochs=2",
        "schedule.warmup=1", "schedule.warmup_lr=0", "schedule.min_lr=0", f"output_dir={tmp_path}",
        "task.ema={decay: 0.5}", "schedule.by_epoch=false", "schedule.lag=0",
    ]  # fmt: skip
    trained = run_here(typed, capsys)
    assert trained.status == 0, trained.err
    content = torch.load(trained.folder() / "checkpoints/last.ckpt", weights_only=True)
    assert content["ema_steps"] == content["position"]["step"] == 10
    assert not same(content["state_dict"], content["state_dict_ema"])
    rates = [float(row["train/lr"]) for row in read_rows(trained.folder() / "metrics.csv")
             if row.get("train/lr")]  # fmt: skip
    assert max(rates) <= 1e-3 * 8 / 1024
    tested = run_here([*typed, "mode=test", f"ckpt={trained.folder()}"], capsys)
    assert tested.status == 0, tested.err
    assert summary(tested.folder())["metrics"] == summary(trained.folder())["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_bfloat16(task, tmp_path, capsys):
    more = ["trainer.precision=bf16-mixed", "trainer.fast_dev_run=true"]
    more += ["backbone.pretrained=false"] if task == "transfer" else []
    ended = run_here(arguments(task, tmp_path, *more), capsys)
    assert ended.status == 0, ended.err
    assert summary(ended.folder())["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_weights_in_bfloat16(task, tmp_path, capsys):
    """Including pictures, which are drawn outside the trainer."""
    more = ["trainer.precision=bf16-true", "trainer.limit_train_batches=2"]
    more += ["backbone.pretrained=false"] if task == "transfer" else []
    ended = run_here(arguments(task, tmp_path, *more), capsys)
    assert ended.status == 0, ended.err
    assert summary(ended.folder())["metrics"]
    assert list((ended.folder() / "preview").glob("*.png"))
    for mode in ("test", "predict"):
        typed = [f"mode={mode}", f"ckpt={ended.folder()}", "trainer=cpu", f"output_dir={tmp_path}"]
        evaluated = run_here([*typed, "trainer.precision=bf16-true"], capsys)
        assert evaluated.status == 0, evaluated.err
        assert list((evaluated.folder() / "preview").glob("*.png"))


@pytest.mark.slow
def test_two_processes_evaluate_like_one(outputs, tmp_path, capsys, one_thread):
    more = ["trainer.log_every_n_steps=1", "++head.options.auxiliary_head.dropout_ratio=0.0",
            "backbone.drop_path_rate=0.0", "head.class_weights=null"]  # fmt: skip
    options = {"backbone": "poolformer_s12"}
    ended = command(arguments("segmentation", tmp_path, *more, trainer="ddp_cpu", **options))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("Run folder") == ended.out.count("epoch 1/1") == 1
    folder = ended.folder()
    assert len(list(folder.parent.iterdir())) == 2  # the run and the link to it
    assert "6 training images in batches of 4 (2 processes x 2), 1 epoch" in ended.out
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    first, second = last["random_state"]
    for name in ("torch", "python", "numpy"):
        assert str(first[name]) != str(second[name]), name
    # One process with both halves of the batch has the same losses, after the step too; weighted
    # means would be over the pixels of each process.
    whole = arguments("segmentation", tmp_path / "one", *more, "data.batch_size=4", **options)
    alone = run_here(whole, capsys).folder()
    both = (read_rows(path / "metrics.csv") for path in (alone, folder))
    for expected, row in zip(*both, strict=True):
        losses = {name: value for name, value in expected.items() if "loss" in name}
        assert {name: row[name] for name in losses} == pytest.approx(losses, rel=1e-6)
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
    if task in ("classification", "transfer"):  # of 40 and 100 images, one process has one more
        evaluation += ["trainer.devices=3", "data.eval_batch_size=8"]
    several = command(arguments(task, tmp_path, *evaluation, trainer="ddp_cpu"))
    assert (several.status, several.err) == (0, "")
    # Losses are sums of single precision over each process's batches.
    found = summary(several.folder())["metrics"]
    assert found == pytest.approx(summary(alone.folder())["metrics"], rel=1e-6)
    assert found == pytest.approx(summary(ended.folder())["metrics"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), by_turns(*TASKS))
def test_every_host_and_mixer_trains_a_step_of_every_task(name, task, tmp_path, capsys):
    # Two images, since a step of the largest network with the usual 16 takes 20 GB.
    more = ["trainer.fast_dev_run=true", "backbone.pretrained=false", "data.batch_size=2"]
    ended = run_here(
        arguments(task, tmp_path, *more, "data.eval_batch_size=2", backbone=name), capsys
    )
    assert ended.status == 0, ended.err
    facts = summary(ended.folder())
    assert facts["backbone"] == name
    assert facts["metrics"].keys() >= METRICS[task] - {"AP75", "mask_AP75"}
