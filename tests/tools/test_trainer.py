"""Every trainer is built as its config file states."""

import os
from unittest import mock

import pytest
import torch

from tasks.engine.callbacks.progress import ProgressLines
from tests.runs import composed, options
from tools.config.training_length import fill_lengths
from tools.runs.trainer import make_trainer, set_tf32

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


@pytest.fixture
def two_gpus(monkeypatch):
    for place, value in CUDA.items():
        monkeypatch.setattr(place, lambda *_, value=value: value)


@pytest.fixture(autouse=True)
def torch_flags():
    yield
    torch.backends.cudnn.benchmark = False
    set_tf32(None)


def make(folder, *overrides, **options):
    config = composed(*overrides)
    return make_trainer(config.trainer, folder, "val/x", "max", training=True, **options)


FASTER = "trainer.precision=bf16-mixed"


@pytest.mark.parametrize(
    ("typed", "said"),
    [("trainer=auto", FASTER), ("trainer=gpu", None), ("trainer=gpu trainer.precision=32", FASTER),
     ("trainer=cpu", None), ("trainer=cpu trainer.precision=bf16-mixed", None),
     ("trainer=cpu trainer.precision=16-mixed",
      "16-mixed needs a GPU: this CPU computes in bf16-mixed"),
     ("trainer=cpu trainer.precision=bf16-true", "Pass trainer.precision=bf16-mixed")],
)  # fmt: skip
def test_precisions_that_differ_from_what_is_meant_are_told(
    typed, said, two_gpus, tmp_path, caplog
):
    caplog.set_level("INFO")
    make(tmp_path, *typed.split())
    assert (caplog.text.count(said) == 1) if said else "precision" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "fixed_size", "expected"),
    [([], True, True), ([], False, False), (["trainer.deterministic=true"], True, False),
     (["trainer.benchmark=true"], False, True), (["trainer.benchmark=false"], True, False)],
)  # fmt: skip
def test_cudnn_searches_for_fixed_sizes(overrides, fixed_size, expected, tmp_path):
    torch.backends.cudnn.benchmark = not expected
    make(tmp_path, *overrides, fixed_size=fixed_size)
    assert torch.backends.cudnn.benchmark == expected
    torch.use_deterministic_algorithms(False)


def test_tf32_is_torchs_default_unless_typed(tmp_path):
    def flags():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    usual = flags()
    for typed, expected in (("true", (True, True)), ("false", (False, False)), ("null", usual)):
        make(tmp_path, f"trainer.tf32={typed}")
        assert flags() == expected


def test_gradients_of_ddp_are_views_of_its_buckets(tmp_path):
    options = make(tmp_path, "trainer=ddp_cpu").strategy._ddp_kwargs
    assert options == {"broadcast_buffers": False, "gradient_as_bucket_view": True}


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
    wants_gpu = config.trainer["accelerator"] == "gpu"
    with mock.patch.dict(os.environ, SLURM if name == "slurm" else {}):
        for patch in patches if wants_gpu else []:
            patch.start()
        try:
            made = make_trainer(config.trainer, tmp_path, "val/x", "max", training=True)
        finally:
            mock.patch.stopall()
    got = (type(made.strategy).__name__, made.num_devices, made.num_nodes, made.precision)
    assert got == expected
    assert set(options("trainer")) == {"auto", "cpu", "ddp_cpu", "gpu", "ddp", "fsdp", "slurm"}


def test_switches_of_trainers(tmp_path):
    for words, message in (
        (["trainer.channels_last=always"], r"trainer\.channels_last"),
        (["trainer.tf32=maybe"], r"trainer\.tf32=maybe"),
        (["trainer.limit_test_batches=1"], r"pass trainer\.limit_val_batches"),
        (["trainer=fsdp", "trainer.gradient_clip_val=1.0"], r"trainer\.gradient_clip_val=null"),
    ):
        with pytest.raises(ValueError, match=message):
            composed("trainer=cpu", *words)
    config = composed("trainer=cpu", "+trainer.enable_progress_bar=false")
    made = make_trainer(config.trainer, tmp_path, "val/x", "max", training=True)
    assert not [one for one in made.callbacks if isinstance(one, ProgressLines)]
    endless = {**OPTIONS, "max_epochs": -1}
    assert fill_lengths(endless, training=False) == endless


OPTIONS = {"limit_train_batches": 1.0, "limit_val_batches": 0.5, "max_epochs": 3, "max_steps": -1}


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
    length, warmup = usual.trainer["max_epochs"], usual.schedule["warmup"]
    with caplog.at_level("INFO"):
        short = composed("data=imagenet", "data.root=/x", *typed, "trainer.max_epochs=2")
    assert short.schedule["warmup"] == round(warmup * 2 / length, 4) < 2
    assert f"schedule.warmup={short.schedule['warmup']}, in proportion to" in caplog.text
    with pytest.raises(ValueError, match=r"schedule\.warmup=5 epochs are the whole of"):
        composed("data=imagenet", "data.root=/x", *typed, "trainer.max_epochs=2",
                 "schedule.warmup=5")  # fmt: skip
