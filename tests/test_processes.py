"""Several processes: what started them, what each draws, and that they train as one does."""

import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from tasks.exact_resume import random_state, seed_process, set_random_state
from tasks.loggers import read_rows
from tests.runs import ROOT, arguments, command, run_here
from tools import processes
from tools.processes import check_trainer

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
        # Shells and scripts within a job are one process, whatever the job's number of tasks.
        (JOB, ONE), ({**JOB, "SLURM_JOB_NAME": "interactive"}, TWO),
        ({**STEP, "SLURM_JOB_NAME": "bash"}, ONE), ({**SRUN, "ENVIRONMENT": "BATCH"}, ONE),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ONE),
        # The other processes that Lightning starts.
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, TWO),
        (TORCHRUN, TWO | {"devices": "2"}), (TORCHRUN, TWO | {"devices": [0, 1]}),
        (TORCHRUN, TWO | {"devices": 1, "num_nodes": 2}),
    ],
)  # fmt: skip
def test_trainers_that_fit_what_was_started(values, options, environment):
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
        ({}, TWO | {"strategy": "fsdp"}, "trainer=fsdp shards over GPUs"),
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


def test_devices_are_counted_as_lightning_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for given, count in ((-1, 8), ("auto", 8), ("-1", 8), ("0,1", 2), ([3], 1), (4, 4)):
        assert processes._devices(ONE | {"accelerator": "gpu", "devices": given}) == count
    assert processes._devices(ONE | {"devices": "auto"}) == 1


def test_each_process_draws_its_own_numbers_and_the_first_those_that_it_had():
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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "transfer", "segmentation"])
def test_two_processes_with_half_the_batch_have_the_losses_of_one(task, tmp_path, capsys):
    """Where nothing is drawn: every step, and validation after it.

    In double precision: in single, sums of another order are 1.4e-6 apart in segmentation.
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
