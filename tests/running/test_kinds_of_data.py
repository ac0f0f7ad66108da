"""Each kind of classification data trains, tests and predicts on a stand-in of its layout."""

import json

import pytest

from datamodules.sample.datamodules import SampleTransfer
from tests.runs import completed, composed, run_here
from tests.stand_ins import (
    write_cifar10,
    write_classes,
    write_elpv,
    write_fashion_mnist,
    write_inaturalist,
    write_parquet,
    write_tars,
)

SYNSETS = ("n01440764", "n01443537", "n01484850")


pytestmark = pytest.mark.usefixtures("backbones_are_options")


def folders(root):
    for split in ("train", "val"):
        write_classes(root / split, SYNSETS, 2)


def packed(write):
    def make(root):
        folders(root / "folders")
        write(root / "folders", root / "packed")
        return root / "packed"

    return make


def cifar100(root):
    data = SampleTransfer(root, train_per_class=1, val_per_class=1)
    data.prepare_data()
    return data.root


# The function that writes the stand-in, and further options.
KINDS = {
    "imagenet": (folders, ()),
    "imagenet recipe=deit": (folders, ("optimizer.reference_batch=null",)),
    "imagenet_tar": (packed(write_tars), ()),
    "imagenet_parquet": (
        packed(lambda here, there: write_parquet(here, there, SYNSETS)),
        ("data.cache_dir={root}/copy",),
    ),
    "folder": (lambda root: write_classes(root, ("cat", "dog"), 4), ("data.val_share=0.25",)),
    "inaturalist2019": (write_inaturalist, ("data.num_classes=null",)),
    "cifar10 recipe=cifar100_scratch": (write_cifar10, ()),
    "cifar10": (
        write_cifar10,
        ("data.selection_share=0.05", "data.resident=true", "data.augmentation.auto_augment=null"),
    ),
    "fashion_mnist": (write_fashion_mnist, ("data.resident=true",)),
    "elpv": (write_elpv, ("data.val_fold=2", "data.selection_share=0.1")),
    "cifar100 recipe=cifar100_scratch": (cifar100, ()),
    "inaturalist2019 experiment=afbo_t17_swin_t": (
        write_inaturalist,
        ("data.num_classes=null", "backbone.pretrained=false", "optimizer.reference_batch=null"),
    ),
}


def typed_for(kind, root):
    data, *chosen = kind.split()
    more = [option.format(root=root) for option in KINDS[kind][1]]
    if any(option.startswith("experiment=") for option in chosen):
        return [*chosen, *more, "backbone.patch_size=2", "data.image_size=32"]
    task, backbone = "task=classification", "backbone=resnet18"
    return [task, f"data={data}", *chosen, backbone, "backbone.patch_size=1", *more,
            "data.image_size=32"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_composes(kind):
    config = composed(*typed_for(kind, "/data"), "data.root=/data")
    assert config.backbone["img_size"] == 32
    assert config.backbone["patch_size"] in (1, 2)
    if "scratch" in kind:
        assert config.trainer["max_epochs"] == 310


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_and_a_test(kind, tmp_path, capsys):
    root = tmp_path / "data"
    root.mkdir()
    place = KINDS[kind][0](root) or root
    typed = [*typed_for(kind, tmp_path), f"data.root={place}", "trainer=cpu", "data.num_workers=0",
             "data.batch_size=2", "data.eval_batch_size=2", "trainer.max_steps=2",
             "trainer.limit_val_batches=2", f"output_dir={tmp_path}/out"]  # fmt: skip
    completed(typed, capsys)
    (folder,) = tmp_path.glob("out/*/*/2*")
    assert "top1" in json.loads((folder / "summary.json").read_text())["metrics"]
    beside = ["trainer=cpu", f"output_dir={tmp_path}/out"]
    assert run_here(["mode=test", f"ckpt={folder}", *beside], capsys).status == 0
    completed(["mode=predict", f"ckpt={folder}", *beside], capsys)
    if kind.startswith("imagenet"):
        (predictions,) = tmp_path.glob("out/**/predictions.json")
        assert "tench" in predictions.read_text()  # the everyday name of n01440764
    if "experiment" in kind:
        assert "AFBO Table 17" in run_here(["mode=test", f"ckpt={folder}", *beside], capsys).out
