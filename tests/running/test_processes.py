"""Several processes: launchers, random numbers, and equality with one process."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.layers import DropPath

from tasks.engine import gather
from tasks.engine.exact_resume import random_state, seed_process, set_random_state
from tasks.engine.loggers import read_rows
from tasks.engine.signals import RunStopped
from tests.runs import ROOT, arguments, command, run_here, summary
from tools.cli import processes
from tools.cli.processes import check_trainer
from tools.runs import process_group

ONE = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto",
       "sync_batchnorm": False}  # fmt: skip
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
        (TORCHRUN, TWO | {"accelerator": "gpu", "devices": [0, 1]}),
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
        ({}, TWO | {"devices": [0, 0]}, "pass trainer.devices=2 or another number from 1 up"),
        (
            {},
            ONE | {"devices": [0, "a"]},
            "trainer.devices=[0, 'a'] must be a number of CPU processes",
        ),
        ({}, TWO | {"devices": 0}, "trainer.devices=0 must be a number of CPU processes"),
        ({}, TWO | {"devices": -1}, "trainer.devices=-1 must be a number of CPU processes"),
        ({}, TWO | {"strategy": "fsdp"}, "trainer=fsdp needs GPUs"),
    ],
)
def test_trainers_that_do_not_fit_are_refused_by_the_first_process(
    values, options, said, environment
):
    with environment(values):
        with pytest.raises(ValueError, match="trainer") as refused:
            check_trainer(options)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
    with environment({**values, "LOCAL_RANK": "1"}), pytest.raises(SystemExit) as ended:
        check_trainer(options)
    assert ended.value.code == 2


def test_a_list_of_devices_sets_the_number_of_processes_without_a_gpu(monkeypatch):
    check_trainer(TWO | {"devices": [0, 1]})
    assert processes.resolve_devices(TWO | {"devices": [0, 1]})["devices"] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpus = TWO | {"accelerator": "gpu", "devices": [0, 1]}
    assert processes.resolve_devices(on_gpus) == on_gpus


def test_devices_are_counted_as_lightning_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for given, count in ((-1, 8), ("auto", 8), ("-1", 8), ("0,1", 2), ([3], 1), (4, 4)):
        assert processes.count_devices(ONE | {"accelerator": "gpu", "devices": given}) == count
    assert processes.count_devices(ONE | {"devices": "auto"}) == 1


def test_each_process_draws_its_own_numbers_and_the_first_keeps_its_own():
    before = random_state()
    try:
        drawn = {}
        for rank in (0, 1, 2, 1):
            torch.manual_seed(5)
            np.random.seed(5)
            seed_process(rank)
            numbers = torch.rand(3).tolist() + np.random.rand(3).tolist()
            assert drawn.setdefault(rank, numbers) == numbers
        torch.manual_seed(5)
        np.random.seed(5)
        assert drawn[0] == torch.rand(3).tolist() + np.random.rand(3).tolist()
        assert len({tuple(numbers) for numbers in drawn.values()}) == 3
    finally:
        set_random_state(before)


def test_mixup_and_drop_path_differ_between_processes():
    before = random_state()
    try:
        drawn = []
        for rank in (0, 1):
            torch.manual_seed(5)
            np.random.seed(5)
            seed_process(rank)
            shares = Mixup(mixup_alpha=0.8, num_classes=2)._params_per_batch()[0]
            drawn.append((shares, DropPath(0.5).train()(torch.ones(64, 1)).flatten().tolist()))
        assert drawn[0][0] != drawn[1][0]
        assert drawn[0][1] != drawn[1][1]
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


def test_processes_without_errors_continue():
    gather.refuse_together(None)


class Child:
    """Stand-in for another process."""

    def __init__(self, status):
        self.returncode = status

    def poll(self):
        return self.returncode

    def wait(self, timeout):
        return self.returncode

    def kill(self):
        self.returncode = self.returncode or -9


def fake_trainer(folder, *others, local_rank=0):
    launcher = SimpleNamespace(procs=[Child(status) for status in others])
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), local_rank=local_rank,
                           is_global_zero=local_rank == 0, default_root_dir=folder)  # fmt: skip


BROKEN = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    ("others", "raised", "said"),
    [
        ([-9], ValueError, "ended with status [-9]"),
        ([], ValueError, "another process of this run has ended"),
        ([2, 1], SystemExit, "2"),  # one process has reported the reason
    ],
)
def test_a_broken_connection_ends_in_one_sentence(others, raised, said, tmp_path):
    trainer = fake_trainer(tmp_path, *others)
    with pytest.raises(raised) as ended, process_group.processes(trainer):
        raise RuntimeError(BROKEN)
    assert said in str(ended.value)
    assert not trainer.strategy.launcher.procs


def test_another_error_ends_the_other_processes_unchanged(tmp_path):
    child = Child(None)
    trainer = fake_trainer(tmp_path)
    trainer.strategy.launcher.procs.append(child)
    with pytest.raises(KeyError), process_group.processes(trainer):
        raise KeyError("x")
    assert child.returncode == -9


def test_only_an_orphaned_process_reports_for_its_parent(environment, tmp_path, monkeypatch):
    parents = iter([100, 100, 1, 1])
    with environment({"LOCAL_RANK": "1"}):
        monkeypatch.setattr(process_group, "POLL", 0.05)
        for parent, raised in ((lambda: 100, SystemExit), (lambda: next(parents, 1), ValueError)):
            monkeypatch.setattr(process_group.os, "getppid", parent)
            trainer = fake_trainer(tmp_path, local_rank=1)
            with pytest.raises(raised), process_group.processes(trainer):
                raise RuntimeError(BROKEN)


def test_a_process_waits_a_while_for_its_new_parent(monkeypatch):
    parents = iter([100, 100, 100])
    monkeypatch.setattr(process_group, "POLL", 5)
    monkeypatch.setattr(process_group.os, "getppid", lambda: next(parents, 1))
    assert process_group._orphaned(100)
    monkeypatch.setattr(process_group, "POLL", 0.05)
    monkeypatch.setattr(process_group.os, "getppid", lambda: 100)
    assert not process_group._orphaned(100)


def test_a_process_that_waits_for_a_dead_one_is_ended(tmp_path, monkeypatch, capsys):
    """As in the store of the process group, which signals and exceptions cannot interrupt."""
    statuses = []
    monkeypatch.setattr(process_group.os, "_exit", statuses.append)
    for others in ([Child(0), Child(-9)], [Child(2)]):
        gone = partial(process_group._failed, others)
        process_group._watch(gone, threading.Event(), tmp_path, 0.01)
    assert statuses == [2, 2]
    err = capsys.readouterr().err
    assert err == f"error: {(tmp_path / 'error.txt').read_text()}"
    assert "ended with status [0, -9]" in err
    over = threading.Event()
    over.set()
    process_group._watch(lambda: None, over, tmp_path, 0.01)
    process_group._watch(lambda: "gone", over, tmp_path, 0.01)
    assert len(statuses) == 2


def test_a_signal_that_ended_another_process_ends_this_one():
    for others, expected in (
        ([Child(0), Child(None)], []),
        ([Child(143)], [signal.SIGTERM]),
        ([Child(-signal.SIGTERM), Child(0)], [signal.SIGTERM]),
        ([Child(130), Child(130)], [signal.SIGINT]),
    ):
        with mock.patch.object(process_group.os, "kill") as kill:
            assert process_group._failed(others) is None
        assert [call.args for call in kill.call_args_list] == [
            (os.getpid(), signum) for signum in expected
        ]
    with (
        mock.patch.object(process_group.STOP, "signum", signal.SIGTERM),
        mock.patch.object(process_group.os, "kill") as kill,
    ):
        assert process_group._failed([Child(143)]) is None
        assert not kill.called
    assert "status [143, 1]" in process_group._failed([Child(143), Child(1)])


def test_a_connection_that_a_signal_broke_ends_as_the_signal_does(tmp_path):
    with pytest.raises(RunStopped) as ended, process_group.processes(fake_trainer(tmp_path, 143)):
        raise RuntimeError(BROKEN)
    assert ended.value.code == 143


# Run that records the random numbers of each process.
RECORDED = """
import json, os, sys
sys.path.insert(0, {root!r})
import timm.layers.drop as drop
from tasks.classification.task import ClassificationTask
from timm.data import Mixup

rank, drawn = os.environ.get("LOCAL_RANK", "0"), dict(mixup=[], masks=[], weights=[])
params, step = Mixup._params_per_batch, ClassificationTask.training_step

def recorded_params(self):
    found = params(self)
    drawn["mixup"].append(float(found[0]))
    return found

def recorded_step(self, batch, batch_idx):
    if not drawn["weights"]:
        drawn["weights"] = [float(p.detach().double().sum()) for p in self.model.parameters()]
    path = [m for m in self.model.modules() if isinstance(m, drop.DropPath)][-1]  # of rate 0.5
    hook = path.register_forward_hook(
        lambda module, given, out: drawn["masks"].append((out == 0).flatten(1).all(1).tolist())
    )
    loss = step(self, batch, batch_idx)
    hook.remove()
    with open({folder!r} + "/" + rank + ".json", "w") as file:
        json.dump(drawn, file)
    return loss

Mixup._params_per_batch = recorded_params
ClassificationTask.training_step = recorded_step
__file__ = {script!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@pytest.mark.slow
def test_two_processes_begin_with_the_same_weights_and_draw_other_numbers(tmp_path):
    script = tmp_path / "recorded.py"
    script.write_text(
        RECORDED.format(root=str(ROOT), folder=str(tmp_path), script=str(ROOT / "tools" / "run.py"))
    )
    more = ["backbone.drop_path_rate=0.5", "task.mixup={mixup_alpha: 0.8}", "trainer.max_steps=2"]
    typed = arguments("classification", tmp_path / "runs", *more, trainer="ddp_cpu")
    ended = command(typed, script=script)
    assert (ended.status, ended.err) == (0, "")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert first["weights"]
    for name in ("mixup", "masks"):
        assert len(first[name]) == len(second[name]) == 2
        assert first[name] != second[name], name


SPOILED = """
import os, sys
sys.path.insert(0, {root!r})
from heads.linear import LinearClassifier

loss, steps = LinearClassifier.loss, iter(range(10000))

def spoiled(self, batch):
    bad = next(steps) == 3 and os.environ.get("LOCAL_RANK") == "1"
    return {{k: v * float("nan") if bad else v for k, v in loss(self, batch).items()}}

LinearClassifier.loss = spoiled
__file__ = {script!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@pytest.mark.slow
def test_nan_in_one_process_ends_both_in_one_sentence(tmp_path):
    script = tmp_path / "spoiled.py"
    script.write_text(SPOILED.format(root=str(ROOT), script=str(ROOT / "tools" / "run.py")))
    more = ["++data.train_copies=4", "trainer.log_every_n_steps=1"]
    typed = arguments("classification", tmp_path / "runs", *more, trainer="ddp_cpu")
    ended = command(typed, script=script)
    assert ended.status == 2
    assert ended.err.startswith("error: process 1 of the run: the loss is nan at step 3")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "transfer", "segmentation"])
def test_two_processes_with_half_the_batch_have_the_losses_of_one(task, tmp_path, capsys):
    """Every step and the validation after it, without random numbers.

    In double precision, since in single precision other sums differ by 1.4e-6 in segmentation.
    """
    more = ["trainer.log_every_n_steps=1", "backbone.drop_path_rate=0.0", "trainer.max_steps=4",
            "backbone.pretrained=false", "trainer.precision=64-true"]  # fmt: skip
    if task == "segmentation":
        # Weighted means are over the pixels of each process.
        more += ["data.num_train=16", "head.class_weights=null",
                 "++head.options.auxiliary_head.dropout_ratio=0.0"]  # fmt: skip
    if task == "classification":
        more += ["++data.train_copies=4"]
    rows = {}
    for trainer, batch in (("cpu", 4), ("ddp_cpu", 2)):
        folder = tmp_path / trainer
        typed = arguments(task, folder, *more, f"data.batch_size={batch}", trainer=trainer)
        ended = run_here(typed, capsys) if trainer == "cpu" else command(typed)
        assert (ended.status, ended.err) == (0, "")
        rows[trainer] = read_rows(ended.folder() / "metrics.csv")
    assert len(rows["cpu"]) >= 4
    for one, two in zip(rows["cpu"], rows["ddp_cpu"], strict=True):
        losses = {name: value for name, value in one.items() if "loss" in name}
        assert {name: two[name] for name in losses} == pytest.approx(losses, rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_compiled_processes_have_the_losses_of_plain_ones(tmp_path, monkeypatch):
    compiled = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    more = ["trainer.log_every_n_steps=1", "backbone.drop_path_rate=0.0", "trainer.max_steps=2"]
    rows = []
    for word in ("false", "true"):
        own = [*more, f"trainer.compile={word}"]
        ended = command(arguments("classification", tmp_path / word, *own, trainer="ddp_cpu"))
        assert ended.status == 0, ended.err
        assert bool(list(compiled.rglob("*.so"))) == (word == "true")
        rows.append(read_rows(ended.folder() / "metrics.csv"))
    for plain, other in zip(*rows, strict=True):
        losses = {name: value for name, value in plain.items() if "loss" in name}
        assert {name: other[name] for name in losses} == pytest.approx(losses, rel=1e-4)


NEAR = """
import sys
sys.path.insert(0, {root!r})
import datamodules.dense.toolkit_data  # provides mmcv's operators before a toolkit needs them
from heads.toolkits.detectors import Detector
from tests import near_truth

Detector.predict_once = near_truth.predict_once
__file__ = {script!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_two_processes_have_the_dense_figures_of_one(task, trained, tmp_path, capsys, monkeypatch):
    """5 images in batches of 2: one process has batches of 2 and 1, the other one of 2."""
    typed = ["mode=test", f"ckpt={trained(task).folder()}", "data.num_val=5", "data.num_workers=0",
             "data.eval_batch_size=2"]  # fmt: skip
    script = tmp_path / "near.py"
    script.write_text(NEAR.format(root=str(ROOT), script=str(ROOT / "tools" / "run.py")))
    if task == "detection":
        # After so little training precision is 0.
        from heads.toolkits.detectors import Detector
        from tests import near_truth

        monkeypatch.setattr(Detector, "predict_once", near_truth.predict_once)
    found, classes = [], []
    for trainer in ("cpu", "ddp_cpu"):
        own = [*typed, f"trainer={trainer}", f"output_dir={tmp_path / trainer}"]
        ended = run_here(own, capsys) if trainer == "cpu" else command(own, script=script)
        assert ended.status == 0, ended.err
        facts = summary(ended.folder())
        found.append(facts["metrics"])
        classes.append((ended.folder() / "classes.csv").read_text())
        assert facts["processes"] == len(found)
    names = {"detection": ("AP", "AP50", "mask_AP"), "segmentation": ("mIoU", "mAcc", "aAcc")}
    most = {"detection": 0.95, "segmentation": 99}[task]
    assert all(0.01 < found[0][name] < most for name in names[task]), found
    assert found[1] == pytest.approx(found[0], abs=1e-9 if task == "detection" else 1e-4)
    assert classes[0] == classes[1]


@pytest.mark.slow
def test_torchrun_with_a_trainer_of_one_process_is_refused_once(tmp_path):
    typed = arguments("classification", tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ended = subprocess.run(
        [*launch, str(ROOT / "tools" / "run.py"), *typed],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert ended.stderr.count("error: torchrun started 2 processes") == 1
    assert "pass trainer=ddp_cpu trainer.devices=2 trainer.num_nodes=1" in ended.stderr
    assert not list(tmp_path.iterdir())
