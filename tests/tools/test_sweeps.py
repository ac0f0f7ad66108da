"""Sweeps: patterns as values, runs in other processes, and the table at the end."""

import shlex
from pathlib import Path

import pytest

from tests.families import rest_slow
from tests.runs import SHORTEST, command, summary
from tools.cli.grammar import parse
from tools.comparing import sweep_table
from tools.comparing.run_records import RunRecord
from tools.config import overrides
from tools.config import run_config as run_config

pytestmark = pytest.mark.usefixtures("sample_cache")


def test_patterns_flags_and_launchers_of_a_sweep(monkeypatch):
    heads = overrides.read_command(["-m", "task=detection", "head=*"]).words[1]
    assert heads == "head=cascade_mask_rcnn,cascade_mask_rcnn_4conv,dino,mask_rcnn,retinanet"
    data = overrides.read_command(["-m", "task=detection", "data=sample_*"]).words[1]
    assert data == "data=sample_detection"
    typed = ["backbone=deit_t", "-m", "seed=1,2"]
    assert overrides.read_command(typed).jobs == [["backbone=deit_t", f"seed={n}"] for n in (1, 2)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"hydra-joblib-launcher: pip install .*mixerlab\[sweep\]"):
        overrides.read_command(["hydra/launcher=joblib"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["backbone=swin_t*"], r"stands for several values; pass -m backbone=swin_t\*"),
        (["-m", "backbone=swix*"], "no backbone matches 'swix"),
        (["-m", "task=detection", "head=u*"], "no head for this task matches 'u.*known: cascade"),
        (["-m", "hydra/launcher=threads"], r"launcher=basic\|joblib\|submitit_local"),
        (["logger=wandbb"], "no logger called 'wandbb'; .*wandb"),
        (["logger=[tensorboard,x]"], "known: csv, mlflow, tensorboard, wandb"),
        (["logger=null"], "for metrics.csv only pass logger=csv"),
    ],
)
def test_mistakes_are_one_sentence(typed, message):
    with pytest.raises(ValueError, match=message):
        overrides.read_command(typed)


@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        ("joblib", "hydra_plugins.hydra_joblib_launcher"),
        ("submitit_local", "hydra_plugins.hydra_submitit_launcher"),
    ],
)
@pytest.mark.slow
def test_runs_in_other_processes(launcher, module, tmp_path):
    """From another folder, with a recipe that computes values, and one failing run."""
    pytest.importorskip(module)
    typed = [*SHORTEST, "backbone=deit_t", "optimizer.lr=1e-3,0.1", "data.batch_size=0,8",
             "data.num_workers=1",
             f"output_dir={tmp_path}/o", f"hydra/launcher={launcher}"]  # fmt: skip
    typed = [one for one in typed if one != "data.batch_size=8"]
    ended = command(["-m", *typed], cwd=tmp_path, timeout=500)
    assert ended.status == 2
    assert ended.err.splitlines()[-1].startswith("error: of the sweep 2 failed: ")
    table = [line.split()[:3] for line in ended.out.splitlines() if line.startswith("deit_t ")]
    assert table == [["deit_t", "0.001", "1"], ["deit_t", "0.1", "1"]] or len(table) == 2
    folders = [path.parent for path in (tmp_path / "o").rglob("summary.json")]
    assert len({path.resolve() for path in folders}) == 2
    assert all(summary(path)["backbone"] == "deit_t" for path in folders)


OVER_GROUPS = [
    ["experiment=afbo_t7_*", "schedule.min_lr=0"],
    ["experiment=afbo_t7_*", "schedule.min_lr=0,1e-6", "+optimizer.eps=1e-7"],
    ["experiment=afbo_t7_*", "~schedule.warmup_lr", "seed=1,2"],
    ["recipe=deit,swin", "backbone.drop_path_rate=0.1", "schedule.min_lr=0", "data=imagenet"],
    ["task=detection,segmentation", "trainer.max_steps=3"],
    ["task=detection", "head=retinanet,mask_rcnn", "head.anchor_scale=4"],
    ["data=folder,cifar100", "data.augmentation={_target_: datamodules.images.transforms."
     "LightAugmentation}"],
    ["backbone=deit_t,swin_t", "backbone.token_mixer=sbm", "backbone.token_mixer.rank=8"],
]  # fmt: skip


@pytest.mark.parametrize("typed", rest_slow(OVER_GROUPS, OVER_GROUPS[:1]), ids=" ".join)
def test_sweeps_over_groups_take_the_options_of_a_single_command(typed):
    """Each run is composed from its own words, whatever the first one's groups hold."""
    command = overrides.read_command(["-m", *typed])
    for job in (command.jobs[0], command.jobs[-1]):
        assert run_config.job_config(job)["backbone"]["name"]
    assert command.hydra_arguments()[0] == "-m"
    (words,) = [word for word in command.hydra_arguments() if word.startswith("+job=")]
    texts = [parse(f"job={text}").value() for text in parse(words).sweep_string_iterator()]
    assert [shlex.split(text) for text in texts] == command.jobs


@pytest.mark.parametrize("mode", ["fit", "test"])
def test_folds_are_averaged_after_their_seeds(mode, capsys, monkeypatch):
    settings = {
        "task_name": "point_segmentation", "backbone.name": "ffnet_3d",
        "data._target_": "datamodules.points.folders.S3DISDataModule",
        "paper.experiment": "ffnet_t5_ffnet_3d_s3dis_act_relu",
    }  # fmt: skip
    runs = [
        RunRecord(
            Path(f"{area} {seed}"), "finished" if mode == "fit" else "evaluation",
            config={**settings, "data.val_area": area, "seed": seed},
            summary={"counts": {"intersection": hits, "union": [20, 60], "target": [10, 50]}},
            metrics={"mIoU": miou, "mAcc": 80.0},
        )
        for area, seed, miou, hits in (
            (1, 0, 60.0, [10, 10]), (1, 1, 70.0, [0, 20]), (5, 0, 75.0, [5, 45])
        )
    ]  # fmt: skip
    if mode == "fit":
        sweep_table.show_averages(runs, ["data.val_area", "seed"])
    else:  # of trained runs
        monkeypatch.setattr(sweep_table, "read_run", {run.folder: run for run in runs}.get)
        sweep_table.show_table([{"folder": str(run.folder)} for run in runs], ["ckpt"])
    heads, figures = (line.split() for line in capsys.readouterr().out.split("\n") if line)
    names = ["mIoU", "mAcc", "pooled", "mIoU", "pooled", "mAcc"]
    assert heads == ["data", "backbone", "data.val_area", *names]  # of area 5 is the row
    # Area 1 has 5 and 15 hits on average: 10 of 40 and 60 of 120 points of the unions.
    assert figures == ["s3dis", "ffnet_3d", "1,", "5", "70", "80", "37.5", "55"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["seed=range(0,inf)"], r"seed=range\(0,inf\) makes more than 10,000 comb"),
        (["seed=range(100000000)"], "makes more than 10,000 combinations"),
        (["optimizer.lr=range(0.0,1.0,1e-9)"], "makes more than 10,000 combinations"),
        (["optimizer.lr=range(0.0,1.0,0.0)"], "has no end or no step"),
        (["seed=range(200)", "optimizer.lr=range(1,100)"], "makes more than 10,000 combinations"),
        (["seed=range(1e308,-1e308,-1e-300)"], "makes more than 10,000 combinations"),
        (["seed=interval(0,1)"], r"seed=interval\(0,1\) has no end"),
        ([f"seed={','.join(['1234'] * 10_001)}"], r"^.{,120} makes more than 10,000"),
        (["seed=range(5,0)"], r"seed=range\(5,0\) makes 0 comb"),
        (["data=glob(nothing*)"], "makes 0 combinations"),
        (["seed=range(200)", "backbone=glob(*)"], "combinations of values; pass 1 to 10,000"),
    ],
)
def test_sweeps_are_counted_before_they_are_made(typed, message):
    with pytest.raises(ValueError, match=message):
        overrides.read_command(["-m", *typed])
