"""Several processes: launchers, random numbers, and equality with one process."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.layers import DropPath

from tasks.engine import devices
from tasks.engine.answers import FILE
from tasks.engine.callbacks.loggers import read_rows
from tasks.engine.checkpoints.exact_resume import random_state, seed_process, set_random_state
from tasks.engine.family import families
from tasks.engine.loops import process_exchange as gather
from tasks.engine.loops.signals import RunStopped
from tests.runs import (
    ROOT,
    SCENES,
    SMALLEST,
    TINY,
    command,
    completed,
    run_here,
    single_words,
    summary,
)  # fmt: skip
from tools.cli import processes
from tools.cli.processes import check_trainer
from tools.runs import nodes, process_group

ONE = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto",
       "sync_batchnorm": False, "precision": "32-true"}  # fmt: skip
TWO = ONE | {"devices": 2, "strategy": "ddp"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2"}  # fmt: skip
JOB = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}
SRUN = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = SRUN | {"SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in {*TORCHRUN, "ENVIRONMENT"}:
            monkeypatch.delenv(name)
    return lambda values: mock.patch.dict(os.environ, values)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, ONE), ({}, TWO), (TORCHRUN, TWO), (SRUN, TWO), (STEP, TWO),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, ONE),
        # Shells and scripts within a job are one process for any number of tasks.
        (JOB, ONE), ({**JOB, "SLURM_JOB_NAME": "interactive"}, TWO),
        ({**STEP, "SLURM_JOB_NAME": "bash"}, ONE), ({**SRUN, "ENVIRONMENT": "BATCH"}, ONE),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ONE),
        # The other processes of Lightning.
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, TWO),
        (TORCHRUN, TWO | {"devices": "2"}),
        (TORCHRUN, TWO | {"accelerator": "auto", "devices": [0, 1]}),
        (TORCHRUN, TWO | {"devices": 1, "num_nodes": 2}),
    ],
)  # fmt: skip
def test_trainers_that_fit_the_started_processes(values, options, environment):
    with environment(values):
        check_trainer(options)


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (TORCHRUN, ONE, "torchrun started 2 processes, but this trainer uses one"),
        (STEP, ONE, "pass trainer=ddp_cpu trainer.devices=2 trainer.num_nodes=1"),
        (SRUN, ONE, "srun started 2 processes, but this trainer uses one"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ONE, "a launcher started 2 processes"),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, ONE, "trainer.devices=2 trainer.num_nodes=2"),
        (TORCHRUN, TWO | {"devices": 4}, "trainer.devices=4 and trainer.num_nodes=1 make 4"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, TWO, "srun started 1 process, but"),
        ({**SRUN, "ENVIRONMENT": "BATCH"}, TWO, "start 2 processes with srun"),
        ({}, TWO | {"sync_batchnorm": True}, "trainer.sync_batchnorm=false"),
        ({}, ONE | {"accelerator": "cuda"}, "trainer.accelerator=cuda, but torch sees no GPU"),
        ({}, TWO | {"devices": 100_000}, "trainer.devices=100000 starts 100000 CPU processes"),
    ],
)
def test_the_first_process_refuses_other_trainers(values, options, said, environment):
    with environment(values):
        with pytest.raises(ValueError, match="trainer") as refused:
            check_trainer(options)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
    with environment({**values, "LOCAL_RANK": "1"}), pytest.raises(SystemExit) as ended:
        check_trainer(options)
    assert ended.value.code == 2


@pytest.fixture
def two_gpus(monkeypatch):
    """Simulate a T4, too old for bfloat16, and an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(7, 5), (9, 0)].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["Tesla T4", "H100"].__getitem__)


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": [1], "precision": "bf16-mixed"}, None),
        ({"devices": 1, "precision": "16-mixed"}, None),
        ({"devices": "auto"}, None),
        ({"devices": 1, "precision": "bf16-mixed"}, "8.0 or above, but Tesla T4 has 7.5; pass"),
        ({"devices": -1, "precision": "bf16-true"}, "trainer.precision=bf16-true needs a GPU"),
        ({"devices": [2]}, None),  # Lightning refuses it
    ],
    ids=str,
)
def test_gpus_are_checked_before_the_data_are_read(
    options, said, accelerator, environment, two_gpus
):
    with environment({}):
        problem = processes._find_problem(ONE | {"accelerator": accelerator} | options)
    assert (problem is None) if said is None else (said in problem and "\n" not in problem)


def test_devices_are_counted_as_lightning_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for given, count in ((-1, 8), ("auto", 8), ("-1", 8), ("0,1", 2), ([3], 1), (4, 4)):
        assert devices.count_devices(ONE | {"accelerator": "gpu", "devices": given}) == count
    assert devices.count_devices(ONE | {"devices": "auto"}) == 1


def test_each_process_draws_its_own_numbers_and_the_first_keeps_its_own():
    before = random_state()

    def drawn(rank=None):
        torch.manual_seed(5)
        np.random.seed(5)
        if rank is not None:
            seed_process(rank)
        shares = Mixup(mixup_alpha=0.8, num_classes=2)._params_per_batch()[0]
        return float(shares), *DropPath(0.5).train()(torch.ones(64, 1)).flatten().tolist()

    try:
        numbers = [drawn(rank) for rank in range(3)]
        assert drawn(1) == numbers[1]
        assert drawn() == numbers[0]
        assert len({shares for shares, *_ in numbers}) == 3
        assert len({tuple(mask) for _, *mask in numbers}) == 3
    finally:
        set_random_state(before)


@pytest.mark.parametrize("found", [{0: "nan"}, {1: "nan"}, {1: "nan", 2: "inf"}])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_one_process_ends_all_and_the_first_reports_it(found, rank, monkeypatch):
    monkeypatch.setattr(gather, "gather_objects", lambda _: [found.get(i) for i in range(3)])
    monkeypatch.setattr(gather.dist, "get_rank", lambda: rank)
    with pytest.raises(SystemExit if rank else ValueError) as ended:
        gather.refuse_together(found.get(rank))
    said = 2 if rank else "nan" if 0 in found else "process 1 of the run: nan"
    assert (ended.value.code if rank else str(ended.value)) == said


class Child:
    def __init__(self, status):
        self.returncode = status

    def poll(self, timeout=None):
        return self.returncode

    wait = poll

    def kill(self):
        self.returncode = self.returncode or -9


def fake_trainer(folder, *children, local_rank=0):
    launcher = SimpleNamespace(procs=list(children))
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), local_rank=local_rank,
                           is_global_zero=local_rank == 0, default_root_dir=folder)  # fmt: skip


BROKEN = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    ("others", "error", "raised", "said"),
    [
        ([-9], RuntimeError(BROKEN), ValueError, "ended with status [-9]"),
        ([], RuntimeError(BROKEN), ValueError, "another process of this run has ended"),
        ([2, 1], RuntimeError(BROKEN), SystemExit, "2"),  # one process has reported the reason
        ([143], RuntimeError(BROKEN), RunStopped, "143"),
        ([None], KeyError("x"), KeyError, "x"),
    ],
)
def test_a_broken_connection_ends_in_one_sentence(others, error, raised, said, tmp_path):
    children = [Child(status) for status in others]
    trainer = fake_trainer(tmp_path, *children)
    with pytest.raises(raised) as ended, process_group.processes(trainer):
        raise error
    assert said in str(ended.value)
    assert getattr(ended.value, "code", None) == (int(said) if said.isdecimal() else None)
    assert not trainer.strategy.launcher.procs
    assert [child.returncode for child in children] == [status or -9 for status in others]


@pytest.fixture
def write_script(tmp_path):
    def write(code):
        before = (
            f"import json, os, sys\nsys.path.insert(0, {str(ROOT)!r})\nFOLDER = {str(tmp_path)!r}\n"
        )
        run = str(ROOT / "tools" / "run.py")
        after = f"__file__ = {run!r}\nexec(compile(open(__file__).read(), __file__, 'exec'))\n"
        (tmp_path / "script.py").write_text(before + code + after)
        return tmp_path / "script.py"

    return write


@pytest.fixture
def pair(monkeypatch):
    """Two processes of a launcher, as threads with a store in memory."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(nodes, "find_launcher", lambda: ("torchrun", 2))
    made = []
    for rank in range(2):
        member = nodes.Nodes()
        own = {"rank": rank, "count": 2, "_store": store}
        monkeypatch.setattr(member, "_connect", lambda *_, own=own, m=member: vars(m).update(own))
        made.append(member)
    for name, seconds in (("POLL", 0.02), ("GRACE", 0.05)):
        monkeypatch.setattr(nodes, name, seconds)
    return made


def test_processes_of_a_launcher_share_the_run_folder(pair, tmp_path):
    first, second = pair
    with first.joined(), second.joined():
        assert first.share("run", tmp_path) == tmp_path == second.share("run", None)
        assert first.share("resumed", None) is second.share("resumed", Path("other")) is None
        first._store.set("gone", str(tmp_path / "gone"))
        with pytest.raises(ValueError, match=r"gone, the run folder of the first .* is missing on"):
            second.share("gone", None)
    alone = nodes.Nodes()
    assert alone.share("run", tmp_path / "gone") == tmp_path / "gone"


@pytest.mark.parametrize("how", ["error", "silence", "end"])
def test_a_process_that_fails_before_training_ends_all(how, pair, tmp_path, monkeypatch, capsys):
    statuses, (first, second) = [], pair
    monkeypatch.setattr(nodes, "SILENT", 0.2 if how == "silence" else 100)
    monkeypatch.setattr(nodes.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    ended = threading.Event()
    with first.joined():
        first.share("run", tmp_path)
        if how != "silence":
            raised = pytest.raises(ValueError, match="no data") if how == "error" else nullcontext()
            with raised, second.joined():
                if how == "error":
                    raise ValueError("no data here")
        ended.wait(5 if how != "end" else 0.5)
    err = capsys.readouterr().err
    said = {"error": "ended: no data here", "silence": "ended without a message", "end": ""}[how]
    assert set(statuses) == ({2} if said else set())
    assert said in err
    assert bool(err) == bool(said) == (tmp_path / "error.txt").exists()


def losses(row):
    return {name: value for name, value in row.items() if "loss" in name}


DIGITS = (*TINY["classification"], "++data.train_copies=4")
WEIGHTS = "task.loss.class_weights=[1,2,3,4,5,6,7,8,9,10]"
TEXTS = ("data.num_train=32", "data.num_val=8", "backbone=bert_tiny", "backbone.drop=0")
CLOUDS = ("data.num_train=8", "data.num_val=2", "data.density=30", "data.grid_size=0.15",
          "data.crop_points=600", "head.lovasz_weight=0",
          "backbone.frozen_stages=7")  # fmt: skip  # all, as batch norms see their own process
# Training of each family and loss; a name may have more words than its family.
EQUAL = {
    "classification": DIGITS,
    "classification weighted": (*DIGITS, WEIGHTS),
    "classification focal": (*DIGITS, WEIGHTS, "task.loss.name=focal"),
    "classification bce": (*DIGITS, WEIGHTS, "task.loss.name=bce"),
    "classification asymmetric": (*DIGITS, "task.loss.name=asymmetric"),
    "transfer": TINY["transfer"],
    "multi_label": ("data.num_train=32", "data.num_val=8"),
    "multi_label asymmetric": ("data.num_train=32", "data.num_val=8", "task.loss.name=asymmetric"),
    "segmentation": (*TINY["segmentation"], "data.num_train=16", "head.class_weights=null",
                     "++head.options.auxiliary_head.dropout_ratio=0.0"),
    "detection fcos": (*SCENES, "data.num_train=16", "head=retinanet", "+head.base=fcos/fcos_r50-"
                       "caffe_fpn_gn-head_1x_coco"),
    "super_resolution": ("backbone=edsr_baseline", "data.scale=4", "data.patch_size=8",
                         "data.patches_per_image=1"),
    "forecasting": ("backbone=dlinear", "data.hours=600", "data.lookback=24", "data.horizon=12"),
    "forecasting pinball": ("backbone=dlinear", "data.hours=600", "data.lookback=24",
                            "data.horizon=12", "head.quantiles=[0.1,0.5]"),
    "point_segmentation": CLOUDS,
    "glue": (*TEXTS, "head.drop=0"),
    "glue masked words": (*TEXTS, "protocol=mlm"),
    "glue next words": (*TEXTS, "protocol=mlm", "backbone=gpt_tiny"),
}  # fmt: skip
# Losses of two processes that differ from those of one, and why.
UNEQUAL = {
    "generation": "each process draws its own noise and times",
    "point_segmentation head.lovasz_weight": "each process sorts its own points",
    "detection head=retinanet": "anchor heads divide by the positives of their own process",
    "detection head=dino": "each process draws its own noise",
    "segmentation head=mask2former": "each process samples its own points, and weighs its classes",
    "segmentation head.class_weights": "weighted means are over the pixels of each process",
    "backbone.mixer.name=sparse_moe": "each process balances its own experts",
    "trainer.sync_batchnorm=false": "batch norms take the statistics of their own process",
}


def test_every_family_is_compared_with_one_process_or_has_a_reason():
    assert {name.partition(" ")[0] for name in (*EQUAL, *UNEQUAL)} >= families().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_with_half_the_batch_have_the_losses_of_one(name, tmp_path, capsys):
    """Every step and the validation after it, without random numbers.

    In double precision, since in single precision other sums differ by 1.4e-6 in segmentation.
    """
    usual = (f"task={name.partition(' ')[0]}", "trainer.log_every_n_steps=1", "logger=csv",
             "++backbone.drop_path_rate=0.0", "trainer.max_epochs=4", "trainer.max_steps=4",
             "backbone.pretrained=false", "trainer.precision=64-true",
             "schedule.warmup=0")  # fmt: skip
    rows = {}
    for trainer, batch in (("cpu", 4), ("ddp_cpu", 2)):
        more = (f"trainer={trainer}", f"data.batch_size={batch}", f"output_dir={tmp_path}")
        typed = single_words([*usual, *EQUAL[name], *more])
        ended = run_here(typed, capsys) if trainer == "cpu" else command(typed)
        assert (ended.status, ended.err) == (0, "")
        rows[trainer] = read_rows(ended.folder() / "metrics.csv")
    assert len([row for row in rows["cpu"] if "train/loss" in row]) == 4
    for one, two in zip(rows["cpu"], rows["ddp_cpu"], strict=True):
        assert losses(two) == pytest.approx(losses(one), rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [("forecasting", ()), ("glue", ()), ("super_resolution", ()),
     ("glue", ("protocol=mlm", "trainer.limit_train_batches=3"))],
    ids=["forecasting", "glue", "super_resolution", "mlm"],
)  # fmt: skip
def test_two_processes_measure_the_same_as_one(family, more, tmp_path, capsys):
    """The figures of both are those over all samples, an odd number of them."""
    typed = (f"task={family}", *SMALLEST[family], "trainer.max_epochs=1", "schedule.warmup=0",
             "logger=csv", *more, "trainer=ddp_cpu", f"output_dir={tmp_path}")  # fmt: skip
    ended = command(single_words(typed))
    assert (ended.status, ended.err) == (0, "")
    typed = ["mode=test", f"ckpt={ended.folder()}", "trainer=cpu", f"output_dir={tmp_path / 'one'}"]
    tested = completed(typed, capsys).folder()
    alone = summary(tested)["metrics"]
    assert alone == pytest.approx(summary(ended.folder())["metrics"], rel=1e-4)
    with np.load(tested / FILE) as one, np.load(ended.folder() / FILE) as two:
        assert one["ids"].tolist() == two["ids"].tolist()
        np.testing.assert_allclose(one["value"], two["value"], rtol=1e-4)


NEAR = """
import datamodules.dense.toolkit_data  # provides mmcv's operators before a toolkit needs them
from heads.toolkits.detectors import Detector
from tests import near_truth

Detector.predict_once = near_truth.predict_once
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "names", "most", "tolerance"),
    [
        ("detection", ("AP", "AP50", "mask_AP"), 0.95, 1e-9),
        ("segmentation", ("mIoU", "mAcc", "aAcc"), 99, 1e-4),
    ],
)
def test_two_processes_have_the_dense_figures_of_one(
    task, names, most, tolerance, trained, tmp_path, capsys, monkeypatch, write_script
):
    """5 images in batches of 2: one process has batches of 2 and 1, the other one of 2."""
    typed = ["mode=test", f"ckpt={trained(task).folder()}", "data.num_val=5", "data.num_workers=0",
             "data.eval_batch_size=2"]  # fmt: skip
    if task == "detection":  # after so little training precision is 0
        from heads.toolkits.detectors import Detector
        from tests import near_truth

        monkeypatch.setattr(Detector, "predict_once", near_truth.predict_once)
    found, classes = [], []
    for trainer in ("cpu", "ddp_cpu"):
        own = [*typed, f"trainer={trainer}", f"output_dir={tmp_path / trainer}"]
        two = trainer == "ddp_cpu"
        ended = command(own, script=write_script(NEAR)) if two else run_here(own, capsys)
        assert ended.status == 0, ended.err
        facts = summary(ended.folder())
        found.append(facts["metrics"])
        classes.append((ended.folder() / "classes.csv").read_text())
        assert facts["processes"] == len(found)
    assert all(0.01 < found[0][name] < most for name in names), found
    assert found[1] == pytest.approx(found[0], abs=tolerance)
    assert classes[0] == classes[1]
