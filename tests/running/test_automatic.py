"""Rate, warm-up, batch and length of custom data sets: chosen by size unless typed."""

import pytest
import torch
import yaml
from torch import nn

from backbones.base import FeatureInfo
from backbones.hosts import resnet
from backbones.hosts.scaffolds.isotropic import IsotropicBackbone
from datamodules.base import BaseDataModule
from tasks.engine.optimisation import automatic
from tasks.engine.run_folder.run_config import RunConfig
from tests.runs import composed, run_shared, summary
from tests.stand_ins import write_classes
from tools.run import main

OWN = {"classification": "folder", "transfer": "folder", "detection": "coco",
       "segmentation": "segmentation_folder"}  # fmt: skip
LAYERED = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LayerNorm(4))
FEW = ("data.batch_size=2", "trainer.accumulate_grad_batches=9")
BATCHED = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


pytestmark = pytest.mark.usefixtures("backbones_are_options")


class Listed(BaseDataModule):
    def __init__(self, images, val_images, batch_size):
        super().__init__(None, batch_size=batch_size)
        self._datasets = {"train": range(images), "val": range(val_images)}

    def image_sizes(self):
        return [(160, 120)]

    def set_scale(self, scale):
        self.scale = scale


def chosen(task, images, *typed, val_images=10, backbone=LAYERED, pretrained=False):
    config = composed(f"task={task}", f"data={OWN[task]}", "trainer=cpu", *typed)
    config.backbone["pretrained"] = pretrained
    data = Listed(images, val_images, automatic.apply_fixed_schedule(config).data["batch_size"])
    automatic.choose_values(config, data, backbone)
    assert data.batch_size == config.data["batch_size"]
    return config


def values(config, *keys):
    return [getattr(config, group).get(name) for group, name in (key.split(".") for key in keys)]


@pytest.mark.parametrize(
    ("task", "images", "batch", "rate", "epochs", "warmup"),
    [("classification", 1, 1, 1.25e-4, 300, 15), ("classification", 20, 16, 5e-4, 268, 13.4),
     ("classification", 135, 16, 5e-4, 103, 5.15), ("classification", 500, 16, 5e-4, 54, 2.7),
     ("classification", 501, 32, 7.07e-4, 54, 2.7), ("classification", 10_000, 64, 1e-3, 15, 0.75),
     ("classification", 50_001, 128, 3.54e-4, 50, 2.5),
     ("transfer", 1_281_167, 128, 3.54e-4, 100, 5), ("detection", 100, 2, 2.12e-4, 40, 2),
     ("detection", 117_266, 2, 2.12e-4, 12, 0.0085), ("segmentation", 300, 2, 2.12e-4, 46, 2.3),
     ("segmentation", 20_210, 2, 2.12e-4, 30, 0.1484)],
)  # fmt: skip
def test_values_follow_the_size_of_the_set(task, images, batch, rate, epochs, warmup):
    config = chosen(task, images)
    assert automatic.auto_keys(config) == []
    keys = ("data.batch_size", "optimizer.lr", "trainer.max_epochs", "schedule.warmup")
    assert values(config, *keys) == [batch, rate, epochs, warmup]
    own = keys if OWN[task] == "folder" else keys[1:]
    assert config.automatic.keys() >= set(own)
    if OWN[task] in ("coco", "segmentation_folder"):
        assert config.data["scale"] == ([400, 240] if task == "detection" else [960, 240])
        assert config.automatic["data.scale"].endswith("x the median image of 160x120")
    if task == "detection":
        thirds = pytest.approx([epochs * 2 / 3, epochs * 11 / 12], abs=1e-3)
        assert config.schedule["milestones"] == thirds


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["data.batch_size=64"], {"optimizer.lr": 1e-3}),
        (["optimizer.lr=3e-5"], {"optimizer.lr": 3e-5, "data.batch_size": 16}),
        (["trainer.max_epochs=40"], {"trainer.max_epochs": 40, "schedule.warmup": 2}),
        # 8 steps an epoch
        (["trainer.max_steps=400"], {"trainer.max_epochs": -1, "schedule.warmup": 2.5}),
        (["trainer.max_steps=400", "trainer.max_epochs=20"], {"schedule.warmup": 1}),
        (["schedule.warmup=7"], {"schedule.warmup": 7, "trainer.max_epochs": 103}),
        (["trainer.limit_train_batches=2", "trainer.max_steps=400"], {"schedule.warmup": 10}),
        (["trainer.accumulate_grad_batches=4"], {"data.batch_size": 16, "optimizer.lr": 1e-3}),
        # 8 images in a step
        ([*FEW, "trainer.limit_train_batches=4"], {"optimizer.lr": 3.54e-4}),
        (["trainer.devices=2"], {"data.batch_size": 8, "optimizer.lr": 5e-4}),
        (["trainer.check_val_every_n_epoch=1"], {"trainer.check_val_every_n_epoch": 1}),
        (["+trainer.val_check_interval=2"], {"trainer.check_val_every_n_epoch": 1}),
    ],
)
def test_typed_values_win_and_others_follow(typed, expected):
    config = chosen("classification", 135, *typed)
    assert values(config, *expected) == [*expected.values()]
    assert not {line.partition("=")[0].lstrip("+") for line in typed} & config.automatic.keys()


@pytest.mark.parametrize(
    ("task", "images", "given", "expected"),
    [
        # The start and the norms decide the rate.
        ("classification", 135, {"backbone": BATCHED}, {"optimizer.lr": 6e-3}),
        ("classification", 135, {"backbone": BATCHED, "pretrained": True}, {"optimizer.lr": 1e-4}),
        ("classification", 135, {"pretrained": "run/best.ckpt"}, {"optimizer.lr": 1e-4}),
        ("detection", 135, {"backbone": BATCHED, "pretrained": True}, {"optimizer.lr": 3.54e-5}),
        ("segmentation", 135, {"pretrained": True}, {"optimizer.lr": 3.54e-5}),
        # Validation takes a small part of a training.
        ("classification", 135, {"val_images": 15}, {"trainer.check_val_every_n_epoch": 3}),
        ("classification", 100, {"val_images": 2_000}, {"trainer.check_val_every_n_epoch": 40}),
        ("classification", 10_000, {"val_images": 1_000}, {"trainer.check_val_every_n_epoch": 1}),
    ],
)
def test_values_follow_the_network_and_the_validation_set(task, images, given, expected):
    assert values(chosen(task, images, **given), *expected) == [*expected.values()]


@pytest.mark.parametrize(
    ("typed", "rate", "batch"),
    [
        (["task=classification", "data=folder", "recipe=deit", "backbone=deit_t"], 1e-3, 128),
        (["task=detection", "data=coco", "recipe=swin_coco", "backbone=swin_t"], 1e-4, 2),
        (["task=segmentation", "data=voc", "recipe=swin_ade20k", "backbone=swin_t"], 6e-5, 2),
        (["experiment=afbo_t4_swin_t_mask_rcnn", "trainer=cpu"], 1e-4, 2),
        (["task=classification", "data=folder", "mode=test", "ckpt=README.md"], 1e-3, 128),
    ],
)
def test_recipes_experiments_and_evaluations_keep_their_values(typed, rate, batch):
    config = composed(*typed)
    assert automatic.auto_keys(config) == []
    assert values(config, "optimizer.lr", "data.batch_size") == [rate, batch]
    assert config.optimizer["reference_batch"] == {128: 1024, 2: 16}[batch]
    assert config.trainer["check_val_every_n_epoch"] == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["optimizer.name=sgd"], r"auto is for AdamW, but optimizer.name=sgd; pass optimizer.lr="),
        (["optimizer.reference_batch=512"], r"optimizer.reference_batch=512 scales a typed rate"),
    ],
)
def test_options_that_contradict_a_chosen_rate_are_refused(typed, message):
    with pytest.raises(ValueError, match=message):
        composed("data=folder", *typed)
    composed("data=folder", *typed, "optimizer.lr=0.1")


@pytest.mark.parametrize(
    ("optimizer", "trainer", "line"),
    [
        ({"lr": 1e-3, "reference_batch": 1024}, (16, 1, 1), "learning rate 1.56e-05 = 1e-3 x "
         "16/1024 (batch 16 on 1 device; reference batch 1024)"),
        ({"lr": 1e-4, "reference_batch": 16}, (2, 2, 4), "learning rate 0.0001 = 1e-4 x 16/16 "
         "(batch 2 x 2 accumulated on 4 devices; reference batch 16)"),
        ({"lr": 6e-5}, (2, 1, 1),
         "learning rate 6e-05 for any batch (batch 2 on 1 device; no reference batch)"),
        ({"lr": 6e-5, "layer_decay": 0.9, "groups": [{"match": "*", "weight_decay": 0.1}]},
         (2, 1, 1), "learning rate 6e-05 for any batch (batch 2 on 1 device; no reference batch), "
         "scaled per parameter by optimizer.layer_decay"),
    ],
)  # fmt: skip
def test_the_rate_is_logged_with_its_derivation(optimizer, trainer, line):
    batch, accumulated, devices = trainer
    config = RunConfig(task_name="", backbone={}, head={}, task={}, data={}, optimizer=optimizer)
    assert automatic.describe_rate(config, batch, devices, accumulated) == line


@pytest.mark.parametrize(
    ("accumulated", "limit", "batches", "expected"),
    [(1, 1.0, 6, 1), (4, 1.0, 6, 4), (9, 1.0, 6, 6), (4, 0.5, 6, 3), (4, 2, 6, 2), (4, 0.1, 6, 1)],
)
def test_a_step_has_at_most_the_batches_of_an_epoch(accumulated, limit, batches, expected):
    trainer = {"accumulate_grad_batches": accumulated, "limit_train_batches": limit}
    assert automatic.batches_per_step(trainer, batches) == expected


def test_a_printed_config_explains_auto(capsys):
    main(["data=coco", "task=detection", "--cfg", "job"])
    shown = capsys.readouterr().out
    for name in ("lr", "warmup", "milestones", "max_epochs", "check_val_every_n_epoch"):
        assert f"  {name}: auto # by the number of training images" in shown
    assert "accelerator: auto\n" in shown
    assert yaml.safe_load(shown)["optimizer"]["lr"] == "auto"


SMALL = ("data.image_size=32", "backbone=resnet18", "backbone.patch_size=2", "trainer=cpu",
         "data.num_workers=0", "logger=csv")  # fmt: skip


def test_a_run_logs_saves_and_resumes_its_choices(tmp_path, small):
    write_classes(tmp_path / "set", ("cat", "dog"), 8)
    typed = ["data=folder", f"data.root={tmp_path / 'set'}", "data.val_share=0.25", *SMALL,
             f"output_dir={tmp_path}"]  # fmt: skip
    whole = run_shared([*typed, "trainer.max_steps=1"])
    assert whole.status == 0, whole.err
    rate = "learning rate 0.0052 = 6e-3 x sqrt(12/16), random weights, batch norms only (batch 12"
    assert f"{rate} on 1 device)" in whole.out
    assert "Chosen for 12 training images: data.batch_size=12, optimizer.lr=5.2e-3" in whole.out
    config = yaml.safe_load((whole.folder() / "config.yaml").read_text())
    assert config["optimizer"]["lr"] == summary(whole.folder())["learning_rate"] == 5.2e-3
    assert "optimizer.lr" in config["automatic"]
    # Longer, with the same command: rate and batch stay those of the run.
    typed += ["trainer.max_steps=2", "resume=true"]
    longer = run_shared(typed)
    assert longer.status == 0, longer.err
    assert longer.folder() == whole.folder()
    assert f"{rate} on 1 device)" in longer.out
    assert (
        yaml.safe_load((longer.folder() / "config.yaml").read_text())["schedule"]["warmup"] == 0.1
    )
    # Shorter than the warm-up that was chosen, of which the first epoch was trained.
    config["schedule"]["warmup"] = 5.0
    (whole.folder() / "config.yaml").write_text(yaml.safe_dump(config))
    shorter = run_shared([*typed[:-2], "trainer.max_epochs=3", "trainer.max_steps=-1", typed[-1]])
    assert shorter.status == 0, shorter.err
    assert "optimizer.lr: 0.0052 then, 0.0001 now" in run_shared([*typed, "optimizer.lr=1e-4"]).err
    ended = run_shared(["mode=test", f"ckpt={whole.folder()}", "trainer=cpu"])
    assert ended.status == 0, ended.err
    saved = yaml.safe_load((ended.folder() / "config.yaml").read_text())
    assert saved["data"]["batch_size"] == 12


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


class SmallResNet(IsotropicBackbone):
    """Three blocks of 48 channels on one map of stride 4: hundreds of steps per minute."""

    token_slots = ()
    channel_slots = ()

    def __init__(self, config):
        super().__init__()
        stem = nn.Conv2d(3, 48, 4, 4, bias=False)
        blocks = (ResidualBlock(48) for _ in range(3))
        self.blocks = nn.Sequential(stem, nn.BatchNorm2d(48), nn.ReLU(), *blocks)
        self.set_map(config, 48, nn.Identity())
        self.feature_info = (FeatureInfo(48, 4),)

    def last_map(self, images):
        return self.blocks(images).permute(0, 2, 3, 1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(resnet, "_build", lambda variant, config, **_: SmallResNet(config))
