"""Several processes: launchers, random numbers, and equality with one process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
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
    arguments,
    command,
    completed,
    run_here,
    session_processes,
    single_words,
    start,
    summary,
    wait_for,
)  # fmt: skip
from tools.cli import processes
from tools.cli.processes import check_trainer
from tools.runs import nodes, process_group
from tools.runs import trainer as trainers

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
        ({}, TWO | {"devices": [0, 0]}, "pass trainer.devices=2 or another number from 1 up"),
        *(
            ({}, TWO | {"devices": given}, f"trainer.devices={given} must be a number of CPU proc")
            for given in ([0, "a"], 0, -1)
        ),
        ({}, TWO | {"strategy": "fsdp"}, "trainer=fsdp needs GPUs"),
        ({}, ONE | {"accelerator": "cuda"}, "trainer.accelerator=cuda, but torch sees no GPU"),
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


def test_a_list_of_devices_sets_the_number_of_processes_without_a_gpu(monkeypatch):
    check_trainer(TWO | {"devices": [0, 1]})
    assert devices.resolve_devices(TWO | {"devices": [0, 1]})["devices"] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpus = TWO | {"accelerator": "gpu", "devices": [0, 1]}
    assert devices.resolve_devices(on_gpus) == on_gpus


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
        ({"devices": [2]}, "trainer.devices=[2], but torch sees 2 GPUs; pass a number up to 2"),
        ({"devices": 4}, "or a list such as trainer.devices=[1]"),
    ],
    ids=str,
)
def test_gpus_are_checked_before_the_data_are_read(
    options, said, accelerator, environment, two_gpus
):
    with environment({}):
        problem = processes._find_problem(ONE | {"accelerator": accelerator} | options)
    assert (problem is None) if said is None else (said in problem and "\n" not in problem)


def test_a_run_on_the_cpu_leaves_gpus_alone(two_gpus):
    """A state of CUDA's generator would be read from a GPU, which may be full."""
    state = random_state()
    assert state["cuda"] is None
    set_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})


def test_devices_are_counted_as_lightning_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for given, count in ((-1, 8), ("auto", 8), ("-1", 8), ("0,1", 2), ([3], 1), (4, 4)):
        assert devices.count_devices(ONE | {"accelerator": "gpu", "devices": given}) == count
    assert devices.count_devices(ONE | {"devices": "auto"}) == 1


def test_more_processes_than_training_samples_are_refused():
    data = SimpleNamespace(unit="images", dataset=lambda _: range(3))
    with pytest.raises(ValueError, match="the training set has 3 images, fewer than the 4 proc"):
        trainers.check_fit(SimpleNamespace(world_size=4), None, data)


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


RECORDED = """
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
    with open(f"{FOLDER}/{rank}.json", "w") as file:
        json.dump(drawn, file)
    return loss

Mixup._params_per_batch = recorded_params
ClassificationTask.training_step = recorded_step
"""


@pytest.mark.slow
def test_two_processes_begin_with_the_same_weights_and_draw_other_numbers(tmp_path, write_script):
    more = ["backbone.drop_path_rate=0.5", "task.mixup={mixup_alpha: 0.8}", "trainer.max_steps=2"]
    typed = arguments("classification", tmp_path / "runs", *more, trainer="ddp_cpu")
    ended = command(typed, script=write_script(RECORDED))
    assert (ended.status, ended.err) == (0, "")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert first["weights"]
    for name in ("mixup", "masks"):
        assert len(first[name]) == len(second[name]) == 2
        assert first[name] != second[name], name


SPOILED = """
from heads.linear import LinearClassifier

loss, steps = LinearClassifier.loss, iter(range(10000))

def spoiled(self, batch):
    bad = next(steps) == 3 and os.environ.get("LOCAL_RANK") == "1"
    return {k: v * float("nan") if bad else v for k, v in loss(self, batch).items()}

LinearClassifier.loss = spoiled
"""


@pytest.mark.slow
def test_nan_in_one_process_ends_both_in_one_sentence(tmp_path, write_script):
    more = ["++data.train_copies=4", "trainer.log_every_n_steps=1"]
    typed = arguments("classification", tmp_path / "runs", *more, trainer="ddp_cpu")
    ended = command(typed, script=write_script(SPOILED))
    assert ended.status == 2
    assert ended.err.startswith("error: process 1 of the run: the loss is nan at step 3")
    assert len(ended.err.splitlines()) == 1


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


STUCK = """
import time
from pathlib import Path
from heads.linear import LinearClassifier
from tasks.engine.loops import signals

loss, steps = LinearClassifier.loss, iter(range(10000))
signals.STEP = 3.0

def stuck(self, batch):
    if next(steps) == 3 and os.environ.get("LOCAL_RANK") == "1":
        Path(FOLDER, "stuck").touch()
        time.sleep(1000)
    return loss(self, batch)

LinearClassifier.loss = stuck
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["first", "group"])
def test_a_signal_ends_a_process_that_waits_for_another(to, tmp_path, write_script):
    more = ["++data.train_copies=4", "trainer.log_every_n_steps=1"]
    typed = arguments("classification", tmp_path / "runs", *more, trainer="ddp_cpu")
    process = start(typed, script=write_script(STUCK), start_new_session=True)
    wait_for(process, (tmp_path / "stuck").exists)
    time.sleep(2)
    (os.kill if to == "first" else os.killpg)(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 143
    assert "a step that waits for another process" in err
    until = time.monotonic() + 10
    while left := session_processes(process.pid):
        assert time.monotonic() < until, left


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
        assert losses(other) == pytest.approx(losses(plain), rel=1e-4)


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


OWN_DISK = """
from pathlib import Path

is_dir = Path.is_dir
if os.environ["RANK"] == "1":  # this node does not see the run folder
    Path.is_dir = lambda path: "runs" not in path.parts and is_dir(path)
"""


@pytest.mark.slow
def test_a_node_without_the_run_folder_ends_the_other_node(tmp_path, write_script):
    script, port = write_script(OWN_DISK), str(29500 + os.getpid() % 1000)
    typed = arguments("classification", tmp_path / "runs", "trainer.num_nodes=2",
                      "trainer.devices=1", trainer="ddp_cpu")  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
              "--master-addr=127.0.0.1", f"--master-port={port}"]  # fmt: skip
    started = [
        subprocess.Popen([*launch, f"--node-rank={rank}", str(script), *typed], cwd=ROOT, text=True,
                         stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for rank in range(2)
    ]  # fmt: skip
    ends = [process.communicate(timeout=200)[1] for process in started]
    assert all(process.returncode for process in started)
    assert all(end.count("error: ") == 1 for end in ends)
    assert "error: process 1 of the run, on " in ends[0]
    assert "pass an output_dir on a disk that all nodes share" in ends[0]


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
