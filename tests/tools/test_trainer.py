"""Every trainer is built as its config file states."""

import os
from unittest import mock

import pytest

from tasks.engine.callbacks import ProgressLines
from tests.runs import composed, options
from tools.config.training_length import LIMITS, fill_lengths
from tools.runs.trainer import make_trainer

CUDA = {
    "torch.cuda.is_available": True,
    "torch.cuda.device_count": 2,
    "torch.cuda.get_device_capability": (9, 0),
    "torch.cuda.get_device_name": "GPU",
    "torch.cuda.current_device": 0,
    "lightning.fabric.accelerators.cuda.num_cuda_devices": 2,
}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2",
         "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("auto", [], ("SingleDeviceStrategy", 1, 1, "32-true")),
        ("cpu", [], ("SingleDeviceStrategy", 1, 1, "32-true")),
        ("ddp_cpu", [], ("DDPStrategy", 2, 1, "32-true")),
        ("gpu", [], ("SingleDeviceStrategy", 1, 1, "bf16-mixed")),
        ("ddp", [], ("DDPStrategy", 2, 1, "bf16-mixed")),
        ("ddp", ["trainer.num_nodes=4"], ("DDPStrategy", 2, 4, "bf16-mixed")),
        ("fsdp", ["trainer.gradient_clip_val=null"], ("FSDPStrategy", 2, 1, "bf16-mixed")),
        ("slurm", ["trainer.num_nodes=2"], ("DDPStrategy", 2, 2, "bf16-mixed")),
    ],
)
def test_every_trainer_is_built(name, overrides, expected, tmp_path):
    """With two simulated GPUs for the trainers that need them."""
    config = composed("task=detection", f"trainer={name}", *overrides)
    patches = [mock.patch(place, lambda *_, value=value: value) for place, value in CUDA.items()]
    wants_gpu = config["trainer"]["accelerator"] == "gpu"
    with mock.patch.dict(os.environ, SLURM if name == "slurm" else {}):
        for patch in patches if wants_gpu else []:
            patch.start()
        try:
            made = make_trainer(config["trainer"], tmp_path, "val/x", "max", training=True)
        finally:
            mock.patch.stopall()
    got = (type(made.strategy).__name__, made.num_devices, made.num_nodes, made.precision)
    assert got == expected
    assert set(options("trainer")) == {"auto", "cpu", "ddp_cpu", "gpu", "ddp", "fsdp", "slurm"}


@pytest.mark.parametrize(
    ("precision", "line"),
    [
        ("16-mixed", "16-mixed needs a GPU: this CPU computes in bf16-mixed"),
        ("bf16-true", "Pass trainer.precision=bf16-mixed"),
        ("bf16-mixed", None),
    ],
)
def test_precisions_that_differ_from_what_is_meant_are_told(precision, line, tmp_path, caplog):
    config = composed("trainer=cpu", f"trainer.precision={precision}")
    with caplog.at_level("INFO"):
        make_trainer(config["trainer"], tmp_path, "val/x", "max", training=True)
    assert (line in caplog.text) if line else not caplog.text


def test_switches_of_trainers(tmp_path):
    config = composed("trainer=cpu", "trainer.channels_last=always")
    with pytest.raises(ValueError, match=r"trainer\.channels_last"):
        make_trainer(config["trainer"], tmp_path, "val/x", "max", training=True)
    config = composed("trainer=fsdp", "trainer.accelerator=cpu", "trainer.gradient_clip_val=1.0")
    with pytest.raises(ValueError, match=r"trainer\.gradient_clip_val=null"):
        make_trainer(config["trainer"], tmp_path, "val/x", "max", training=True)
    config = composed("trainer=cpu", "+trainer.enable_progress_bar=false")
    made = make_trainer(config["trainer"], tmp_path, "val/x", "max", training=True)
    assert not [one for one in made.callbacks if isinstance(one, ProgressLines)]
    endless = {**OPTIONS, "max_epochs": -1}
    assert fill_lengths(endless, training=False) == endless


OPTIONS = {"limit_train_batches": 1.0, "limit_val_batches": 0.5, "max_epochs": 3, "max_steps": -1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"limit_train_batches": None, "limit_val_batches": None}, {"limit_val_batches": 1.0}),
        ({"max_epochs": None, "max_steps": 5}, {"max_epochs": -1, "max_steps": 5}),
        ({"max_epochs": -1, "max_steps": 5}, {"max_epochs": -1, "max_steps": 5}),
        ({"max_steps": None}, {}),
        ({"overfit_batches": 0}, {"overfit_batches": 0}),
        ({"overfit_batches": None}, {"overfit_batches": None}),
        ({"overfit_batches": 2}, dict.fromkeys((*LIMITS, "overfit_batches"), 2)),
        ({"overfit_batches": 0.1}, dict.fromkeys((*LIMITS, "overfit_batches"), 0.1)),
    ],
    ids=str,
)
def test_options_that_lightning_takes_are_numbers(given, expected):
    assert fill_lengths({**OPTIONS, **given}, training=True) == {**OPTIONS, **expected}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_epochs": None}, r"trainer\.max_steps=<steps>"),
        ({"max_epochs": -1}, r"trainer\.max_epochs=<epochs>"),
        ({"overfit_batches": -1}, r"trainer\.overfit_batches=-1 must be"),
        ({"overfit_batches": 1.5}, r"trainer\.overfit_batches=1\.5 must be"),
        ({"overfit_batches": "a"}, r"trainer\.overfit_batches=a is not"),
    ],
    ids=str,
)
def test_an_endless_or_empty_training_is_rejected(given, said):
    with pytest.raises(ValueError, match=said):
        fill_lengths({**OPTIONS, **given}, training=True)


@pytest.mark.parametrize("typed", [[], ["backbone=swin_t", "recipe=swin"]])
def test_a_run_shorter_than_its_warmup_has_a_shorter_one(typed, caplog):
    """The warmup keeps its share of the training length."""
    usual = composed("data=imagenet", "data.root=/x", *typed)
    length, warmup = usual["trainer"]["max_epochs"], usual["schedule"]["warmup"]
    with caplog.at_level("INFO"):
        short = composed("data=imagenet", "data.root=/x", *typed, "trainer.max_epochs=2")
    assert short["schedule"]["warmup"] == round(warmup * 2 / length, 4) < 2
    assert f"schedule.warmup={short['schedule']['warmup']}, in proportion to" in caplog.text
    with pytest.raises(ValueError, match=r"schedule\.warmup=5 epochs are the whole of"):
        composed("data=imagenet", "data.root=/x", *typed, "trainer.max_epochs=2",
                 "schedule.warmup=5")  # fmt: skip
