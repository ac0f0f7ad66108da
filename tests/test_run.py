"""python tools/run.py from the command to the run folder: the four tasks, modes, resume, errors."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from backbones import list_backbones
from datamodules import SampleClassification
from tasks.loggers import read_rows
from tests.runs import TINY, arguments, command, run_here, start
from tools import command_line, report, run_folder
from tools.errors import one_line_errors

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


@pytest.mark.slow
def test_a_papers_recipe_on_class_folders(sample_cache, tmp_path, capsys, one_thread):
    """DeiT's: repeated augmentation, mixup and an average, which the evaluation finds again."""
    data = SampleClassification(sample_cache, digits_per_class=4, train_copies=1, num_workers=0)
    data.prepare_data()
    data.setup()
    typed = [
        "data=imagenet", f"data.root={data.folder}", "recipe=deit", "trainer=cpu",
        "data.image_size=64", "data.batch_size=8", "data.num_workers=0", "trainer.max_epochs=2",
        "schedule.warmup=1", "schedule.warmup_lr=0", "schedule.min_lr=0", f"output_dir={tmp_path}",
        "task.ema.decay=0.5",
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


@pytest.mark.parametrize("task", TASKS)
def test_bfloat16(task, tmp_path, capsys):
    more = ["trainer.precision=bf16-mixed", "trainer.fast_dev_run=true"]
    more += ["backbone.pretrained=false"] if task == "transfer" else []
    ended = run_here(arguments(task, tmp_path, *more), capsys)
    assert ended.status == 0, ended.err
    assert summary(ended.folder())["metrics"]


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


def test_a_run_that_is_stopped_and_killed_ends_as_if_it_was_not(
    tmp_path, capsys, caplog, one_thread
):
    """SIGTERM within the first epoch, kill -9 after it: each time resume=true goes on exactly."""
    # Long enough that the signals arrive in time; drop path draws from the global generator.
    long = ["++data.train_copies=5", "backbone.drop_path_rate=0.2", "trainer.log_every_n_steps=1"]
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
    best, last = (parent / "latest" / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    wait_for(process, lambda: best.is_file() and last.stat().st_mtime > best.stat().st_mtime)
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
    assert rows == [row for row in expected if row["step"] in steps]
    assert len(rows) >= len(expected) - 1  # the step of the SIGTERM goes unlogged

    before = (ended.folder() / "summary.json").read_text()
    with caplog.at_level("INFO"):
        assert run_here([*typed, "resume=true"], capsys).status == 0
    assert "The run is finished (top1 " in caplog.text
    assert (ended.folder() / "summary.json").read_text() == before


@pytest.mark.slow
def test_two_processes_that_are_stopped_go_on_exactly(tmp_path, capsys):
    """SIGTERM reaches the first process only; both save and stop, and both resume."""
    more = ["++data.train_copies=8", "backbone.drop_path_rate=0.2", "trainer.log_every_n_steps=1"]
    typed = {
        name: arguments("classification", tmp_path / name, *more, trainer="ddp_cpu", epochs=2)
        for name in ("whole", "broken")
    }
    whole = command(typed["whole"])
    process = start(typed["broken"])
    parent = tmp_path / "broken" / "classification" / "deit_t"
    wait_for(process, lambda: list(parent.glob("2*/tensorboard/*")))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "")
    ended = command([*typed["broken"], "resume=true"])
    assert (ended.status, ended.err) == (0, "")
    assert same(weights(ended.folder()), weights(whole.folder()))


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others(tmp_path):
    typed = arguments("classification", tmp_path, "trainer.log_every_n_steps=1",
                      trainer="ddp_cpu", epochs=50)  # fmt: skip
    process = start(typed)
    parent = tmp_path / "classification" / "deit_t"
    wait_for(process, lambda: list(parent.glob("2*/tensorboard/*")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (other,) = [
        int(pid) for pid in children if "run.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(other, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: the other processes of this run ended with status [-9]")
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", list_backbones())
def test_every_backbone_takes_a_step_of_every_task(name, task, tmp_path, capsys):
    more = ["trainer.fast_dev_run=true", "backbone.pretrained=false"]
    ended = run_here(arguments(task, tmp_path, *more, backbone=name), capsys)
    assert ended.status == 0, ended.err
    facts = summary(ended.folder())
    assert facts["backbone"] == name
    assert facts["metrics"].keys() >= METRICS[task] - {"AP75", "mask_AP75"}


def test_ctrl_c_ends_an_evaluation_at_once(trained, tmp_path):
    folder = trained("classification").folder()
    typed = arguments("classification", tmp_path, "mode=test", f"ckpt={folder}")
    process = start(typed)
    assert process.stdout.readline().startswith("Sample data in")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def refused(typed, output_dir, capsys):
    """The one line that a command ends with, after which nothing is left."""
    ended = run_here(typed, capsys)
    assert ended.status == 2, ended
    assert ended.err.startswith("error: "), ended.err
    assert not [path for path in output_dir.rglob("*") if not path.is_dir()]
    assert not [path for path in output_dir.rglob("2*")]  # no run folder
    return ended.err


MISTAKES = {
    # Names.
    "task=clasification": "did you mean classification",
    "backbone=swin_t_afob": "did you mean swin_t_afbo",
    "task=detection head=mask_rcn": "did you mean mask_rcnn",
    "data=image_net": "did you mean imagenet",
    "recipe=sample_lon": "did you mean sample_long",
    "trainer=cpus": "did you mean cpu",
    "optimzer.lr=1": "did you mean optimizer",
    "optimizer.lrr=1 model.x=2": "optimizer has no option 'lrr'; did you mean lr",
    "data.batchsize=3": "did you mean batch_size",
    "+data.batchsize=3": "no option data.batchsize; did you mean batch_size",
    "backbone.drop_pth_rate=0.3": "did you mean drop_path_rate",
    "backbone=deit_t_afbo backbone.mixer.g22=4": "did you mean g2",
    "trainer.max_epoch=3": "did you mean max_epochs",
    "+trainer.max_epoch=3": "no option trainer.max_epoch; did you mean max_epochs",
    "+optimizer.momentum=0.9": "adamw has no option",
    "+schedule.warmups=1": "did you mean warmup",
    "task=detection +head.num_roi=3": "did you mean num_rois",
    "task=detection +head.options.rpn_head.anchor_generator.scale=3": "has no 'scale' there",
    "protocol=linear_probe": "no option 'protocol'",
    "backbone=swin_t,swin_s": "add --multirun",
    "task=classification recipe=sample_long": "this recipe is for task=detection or segmentation; "
    "task=classification takes recipe=convnext, recipe=cyclemlp, ",
    "task=segmentation backbone=swin_t recipe=swin": "this recipe is for task=classification; "
    "task=segmentation takes recipe=ffnet_ade20k, ",
    "recipe=deit": "this recipe is made for data=imagenet: pass data=imagenet data.root=",
    "data=imagenet recipe=swin backbone=deit_t": "and not for deit_t; pass backbone.drop_path_rate",
    "data=imagenet recipe=deit schedule.warmup=5": "schedule.warmup=5 epochs leave nothing",
    "trainer.max_epochs=0": "trainer.max_epochs=0 trains nothing; for the metrics",
    "+schedule.cooldown=1": "schedule.cooldown=1 epochs leave nothing of trainer.max_epochs=1",
    "task.ema={decay:1.0}": "task.ema.decay must be from 0 to below 1, got 1.0",
    "task.ema={dekay:0.9}": "there is no option task.ema.dekay; did you mean decay?",
    "task.mixup={mixup:0.9}": "there is no option task.mixup.mixup; did you mean mixup_alpha",
    "task.mixup={mixup_alpha:0.9} head.label_smoothing=0.1": "would both smooth the labels",
    "schedule.min_lr_ratio=0.1 +schedule.min_lr=1e-6": "exclude each other; set one of them",
    "+optimizer.reference_batch=0": "optimizer.reference_batch must be at least 1 or null, got 0",
    # Types and ranges.
    "backbone=deit_t_afbo backbone.mixer.g2=abc": "mixer.g2=abc is not a whole number",
    "backbone=deit_t_afbo backbone.mixer.hidden_ratio=-1": "hidden_ratio must leave at least one",
    "optimizer.lr=-1": "optimizer.lr must be above 0, got -1",
    "optimizer.lr=fast": "optimizer.lr=fast is not a number",
    "optimizer.weight_decay=-1": "must not be below 0",
    "optimizer.name=adam": "must be one of adamw, sgd",
    "schedule.name=linear": "must be one of cosine, poly, constant, multistep",
    "schedule.warmup=9": "leave nothing of trainer.max_epochs=1",
    "schedule.warmup=-1": "must not be below 0",
    "schedule.min_lr_ratio=3": "must be from 0 to 1",
    "backbone.drop_path_rate=2": "drop_path_rate must be in",
    "backbone.drop_path_rate=much": "is not a number",
    "backbone.img_size=10": "at least 64",
    "data.batch_size=0": "data.batch_size=0 is too low",
    "data.batch_size=few": "data.batch_size=few is not a whole number",
    "data.num_workers=-1": "too low",
    "seed=-1": "seed=-1 is not from 0",
    "seed=x": "seed=x is not a whole number",
    "resume=maybe": "resume=maybe is not true or false",
    "trainer.max_epochs=x": "trainer.max_epochs=x is not a whole number",
    "trainer.precision=3": "trainer.precision=3 is not one of",
    "trainer.devices=0": "Lightning refuses the options of trainer",
    "trainer.strategy=magic": "Lightning refuses the options of trainer",
    "trainer.accumulate_grad_batches=0": "must be above 0",
    "trainer.limit_train_batches=0": "must be above 0",
    "task=detection head.num_rois=some": "head.num_rois=some is not a whole number",
    "task=detection head.name=yolo": "known: mask_rcnn",
    "head._target_=os.system": "head._target_=os.system is refused",
    "head._target_=heads.nowhere.Linear": "is refused: there is no such class",
    "head._target_=heads.linear.Nobody": "is refused: there is no such class",
    "optimizer.lr=nan": "optimizer.lr=nan is not a number",
    "optimizer=sgd": "optimizer=sgd is not a group of options",
    "data=null": "data=null is refused: a run needs its data",
    "~trainer": "~trainer is refused: a run needs its trainer",
    "backbone=[deit_t,swin_t]": "pass -m backbone=deit_t,swin_t",
    "backbone.name=swin_t": "pass backbone=swin_t",
    # What does not go together.
    "mode=train": "mode=train is not one of fit, validate, test, predict",
    "mode=test": "pass ckpt=",
    "mode=test ckpt=/nowhere": "there is no checkpoint or run folder at /nowhere",
    "mode=test ckpt=/nowhere resume=true": "pass ckpt=<run folder> alone",
    "ckpt=/nowhere": "pass resume=true",
    "resume=true": "there is no run to resume in",
    "resume=true ckpt=/nowhere": "there is no checkpoint or run folder at /nowhere",
    "input=/tmp": "pass mode=predict",
    "backbone.pretrained=/nowhere": "there is no checkpoint or run folder at /nowhere",
    "task=detection head=upernet": "task=detection takes head=cascade_mask_rcnn, head=mask_rcnn",
    "task=segmentation head=mask_rcnn": "task=segmentation takes head=upernet",
    "head=retinanet": "task=classification takes head=linear",
    "task=detection data=cifar100": "task=detection takes data=coco",
    "data=coco": "task=classification takes data=cifar100",
    "task=transfer": "backbone.pretrained=",
    # What is not there.
    "data=imagenet": "data=imagenet data.root=/data/imagenet",
    "data=imagenet data.root=/nowhere": "data.root /nowhere is not a folder",
    "task=detection data=coco data.root=/tmp": "no folder /tmp/train2017",
    "trainer=gpu": "torch sees no GPU",
    "trainer=ddp": "torch sees no GPU",
    "trainer=fsdp": "torch sees no GPU",
    "trainer=slurm": "torch sees no GPU",
}  # fmt: skip


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_ends_in_one_line(typed, tmp_path, capsys):
    if "no GPU" in MISTAKES[typed] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = typed.split()
    task = next((a[5:] for a in given if a.startswith("task=") and a[5:] in TINY), "classification")
    named = {argument.lstrip("+").partition("=")[0] for argument in given}
    own_data = "data" in named  # another dataset than the sample has other options
    base = [
        argument
        for argument in arguments(task, tmp_path)
        if argument.partition("=")[0] not in named
        and not (own_data and argument.lstrip("+").startswith("data."))
    ]
    text = refused([*base, *given], tmp_path, capsys)
    assert MISTAKES[typed] in text
    if task != "transfer":
        assert len(text.splitlines()) == 1


def test_a_mistake_ends_the_real_command_with_status_2(tmp_path):
    ended = command(arguments("classification", tmp_path, "optimizer.lr=-1"))
    assert (ended.status, ended.err) == (2, "error: optimizer.lr must be above 0, got -1\n")
    assert not list(tmp_path.rglob("2*"))


@pytest.mark.parametrize("package", ["mmdet", "mmseg"])
def test_dense_tasks_without_their_toolkit(package, tmp_path, capsys, monkeypatch):
    task = {"mmdet": "detection", "mmseg": "segmentation"}[package]
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    text = refused(arguments(task, tmp_path), tmp_path, capsys)
    assert package in text
    assert "make install" in text


def test_output_folder_that_cannot_be_made(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("backbones.create_backbone", lambda **_: pytest.fail("came too far"))
    text = refused_by_file(arguments("classification", tmp_path / "file"), capsys)
    assert "pass output_dir=<a writable folder>" in text


def refused_by_file(typed, capsys):
    ended = run_here(typed, capsys)
    assert ended.status == 2
    return ended.err


class TestCheckpointsThatDoNotFit:
    @pytest.fixture
    def folder(self, trained):
        return trained("classification").folder()

    def evaluate(self, tmp_path, capsys, ckpt, *more, task="classification", backbone="deit_t"):
        out = tmp_path / "out"
        out.mkdir()
        typed = arguments(task, out, "mode=validate", f"ckpt={ckpt}", *more, backbone=backbone)
        return refused(typed, out, capsys)

    def test_another_backbone(self, folder, tmp_path, capsys):
        text = self.evaluate(tmp_path, capsys, folder, backbone="poolformer_s12")
        assert re.search(r"\d+ keys differ \(missing backbone.stem", text)

    def test_another_task(self, folder, tmp_path, capsys):
        text = self.evaluate(tmp_path, capsys, folder, task="segmentation")
        assert re.search(r"\d+ keys differ \(missing model.backbone", text)

    def test_another_number_of_classes(self, folder, tmp_path, capsys):
        text = self.evaluate(tmp_path, capsys, folder, "backbone.pretrained=false", task="transfer")
        assert "classifier.weight: (10, 192) instead of (100, 192)" in text

    def test_truncated(self, folder, tmp_path, capsys):
        whole = (folder / "checkpoints" / "best.ckpt").read_bytes()
        (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
        text = self.evaluate(tmp_path, capsys, tmp_path / "half.ckpt")
        assert "half.ckpt is truncated or not a checkpoint" in text

    def test_not_finite(self, folder, tmp_path, capsys):
        content = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
        content["state_dict"]["model.classifier.bias"][0] = float("nan")
        torch.save(content, tmp_path / "nan.ckpt")
        text = self.evaluate(tmp_path, capsys, tmp_path / "nan.ckpt")
        assert "model.classifier.bias holds NaN or Inf" in text


class TestResumeThatCannotBe:
    @pytest.fixture
    def broken_off(self, trained, tmp_path):
        """A run that was killed after its training, and what it was started with."""
        folder = trained("classification").folder()
        copy = tmp_path / "classification" / "deit_t" / folder.name
        shutil.copytree(folder, copy)
        run_folder.mark_latest(copy)
        (copy / "summary.json").unlink()
        return copy, arguments("classification", tmp_path, "resume=true", epochs=2)

    def refused(self, typed, capsys):
        ended = run_here(typed, capsys)
        assert (ended.status, len(ended.err.splitlines())) == (2, 1)
        return ended.err

    def test_other_settings(self, broken_off, capsys):
        folder, typed = broken_off
        before = (folder / "config.yaml").read_text()
        text = self.refused([*typed, "optimizer.lr=3e-3", "data.batch_size=4"], capsys)
        assert "data.batch_size: 8 then, 4 now" in text
        assert "optimizer.lr: " in text
        assert (folder / "config.yaml").read_text() == before

    def test_truncated(self, broken_off, capsys):
        folder, typed = broken_off
        last = folder / "checkpoints" / "last.ckpt"
        last.write_bytes(last.read_bytes()[:1000])
        assert "last.ckpt is truncated" in self.refused(typed, capsys)

    def test_weights_alone(self, broken_off, capsys):
        folder, typed = broken_off
        last = folder / "checkpoints" / "last.ckpt"
        torch.save({"state_dict": weights(folder)}, last)
        assert "no training run to go on with" in self.refused(typed, capsys)

    def test_other_data(self, broken_off, capsys):
        folder, typed = broken_off
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace("max_epochs: 2", "max_epochs: 3"))
        typed.append("trainer.max_epochs=3")
        last = folder / "checkpoints" / "last.ckpt"
        content = torch.load(last, weights_only=True)
        content["position"]["batches_per_epoch"] = 7
        torch.save(content, last)
        assert "had 7 batches in an epoch, now there are 5" in self.refused(typed, capsys)

    def test_a_run_that_only_lacks_its_report_gets_it(self, broken_off, capsys):
        folder, typed = broken_off
        before = weights(folder)
        assert run_here(typed, capsys).status == 0
        assert same(before, weights(folder))
        assert summary(folder)["metrics"]


def test_nan_stops_training_and_keeps_the_last_checkpoint(tmp_path, capsys, monkeypatch):
    typed = arguments("classification", tmp_path, epochs=3)
    from heads.linear import LinearClassifier

    steps = iter(range(100))
    loss = LinearClassifier.loss

    def spoiled(self, batch):
        factor = float("nan") if next(steps) == 7 else 1.0  # in the second epoch of five steps
        return {name: value * factor for name, value in loss(self, batch).items()}

    monkeypatch.setattr(LinearClassifier, "loss", spoiled)
    ended = run_here(typed, capsys)
    assert ended.status == 2
    assert ended.err.startswith("error: the loss is nan at step 7")
    folder = tmp_path / "classification" / "deit_t" / "latest"
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 5
    assert read_rows(folder / "metrics.csv")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_in_the_middle_of_training_is_named(
    num_workers, trained, sample_cache, tmp_path, capsys
):
    trained("classification")
    source = next(path for path in sample_cache.glob("classification-4-*"))
    shutil.copytree(source, tmp_path / "data")
    broken = sorted((tmp_path / "data" / "train").rglob("*.jpg"))[17]
    broken.write_bytes(broken.read_bytes()[:500])
    # Another layout of the same files: real data, so that nothing is generated anew.
    base = [a for a in arguments("classification", tmp_path) if "data." not in a]
    ended = run_here(
        [*base, "data=imagenet", f"data.root={tmp_path / 'data'}", "data.image_size=64",
         "data.batch_size=8", f"data.num_workers={num_workers}", "task.mixup=null"],
        capsys,
    )  # fmt: skip
    assert ended.status == 2
    assert str(broken) in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_fault_of_ours_keeps_its_traceback(capsys):
    with pytest.raises(ZeroDivisionError), one_line_errors():
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="not ours"), one_line_errors():
        raise ValueError("not ours")


def test_a_message_of_ours_is_found_below_errors_of_libraries(capsys):
    def library():
        try:
            run_folder.checkpoint_file("/nowhere")
        except ValueError as error:
            raise RuntimeError("the library gave up") from error

    with pytest.raises(SystemExit) as ended, one_line_errors():
        library()
    assert ended.value.code == 2
    assert "no checkpoint or run folder at /nowhere" in capsys.readouterr().err


def test_full_disk_is_one_line(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise OSError(28, "No space left on device", "/data/x")
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: '/data/x'\n"


def test_help_lists_groups_backbones_and_options(tmp_path):
    ended = command(["--help"], cwd=tmp_path)
    assert (ended.status, ended.err) == (0, "")
    assert "python tools/run.py task=detection backbone=swin_t_afbo" in ended.out
    for word in ("swin_t_afbo", "poolformer_m48_glu", "retinanet", "sample_long", "ddp_cpu",
                 "max_epochs", "linear_probe"):  # fmt: skip
        assert word in ended.out
    assert not list(tmp_path.iterdir())


def test_sweep_runs_each_backbone_into_its_own_folder(tmp_path):
    typed = arguments("classification", tmp_path, "trainer.limit_train_batches=1")
    typed[1] = "backbone=deit_t,poolformer_s12"
    ended = command(["-m", *typed], cwd=tmp_path)
    assert (ended.status, ended.err) == (0, "")
    for name in ("deit_t", "poolformer_s12"):
        assert summary(tmp_path / "classification" / name / "latest")["backbone"] == name
    assert {path.name for path in tmp_path.iterdir()} == {"classification", "multirun.yaml"}
    typed[1] = "backbone=deit_t,poolformer_s21"
    with pytest.raises(ValueError, match="did you mean poolformer_s24 or poolformer_s12"):
        command_line.prepare(["-m", *typed])


def test_two_runs_within_a_second_have_their_own_folders(tmp_path):
    folders = {run_folder.new_run_folder(tmp_path, "fit") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def test_latest_leads_to_the_newest_run(tmp_path):
    for _ in range(2):
        folder = run_folder.new_run_folder(tmp_path, "fit")
        run_folder.mark_latest(folder)
        assert (tmp_path / "latest").resolve() == folder
    assert len(list(tmp_path.iterdir())) == 3


def folder_config(output_dir):
    return {"output_dir": str(output_dir), "task_name": "t", "backbone": {"name": "b"},
            "resume": False, "mode": "fit", "ckpt": None}  # fmt: skip


def refuse_a_run(config):
    with pytest.raises(ValueError, match="refused"), run_folder.opened(config):
        raise ValueError("refused")


def test_a_refused_run_leaves_no_folder_that_was_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv(run_folder.ENVIRONMENT, "")  # opened sets it; this puts it back
    refuse_a_run(folder_config(tmp_path / "made" / "outputs"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    refuse_a_run(folder_config(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["t"]
    with run_folder.opened(folder_config(tmp_path)) as folder:
        refuse_a_run(folder_config(tmp_path))
    assert folder.is_dir()


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    config = folder_config(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(run_folder.ENVIRONMENT, str(tmp_path / "of_the_first"))
    with run_folder.opened(config) as folder:
        assert folder == tmp_path / "of_the_first"
    assert not list(tmp_path.iterdir())


def test_table_is_readable_in_a_pipe(tmp_path, capsys):
    report.print_table("title", {"AP50": "0.1", "backbone MACs": "1.2 G"}, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Run folder: {tmp_path}"
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[:-1])) < 60


def test_sweep_of_several_values_names_each_run():
    jobs = command_line._jobs(["backbone=a,b", "seed=range(0,2)", "x=1", "backbone.y=glob(*)"])
    assert [sorted(job) for job in jobs] == [
        ["backbone=a", "seed=0", "x=1"], ["backbone=a", "seed=1", "x=1"],
        ["backbone=b", "seed=0", "x=1"], ["backbone=b", "seed=1", "x=1"],
    ]  # fmt: skip
