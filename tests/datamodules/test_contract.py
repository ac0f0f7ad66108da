"""The contract of every layout: sizes, batches, targets, order, workers, prediction, messages."""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image

import datamodules
from datamodules import (
    ADE20KDataModule,
    CIFAR10DataModule,
    CityscapesDataModule,
    ClassFoldersDataModule,
    CocoDataModule,
    ElpvDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    ImageParquetDataModule,
    ImageTarsDataModule,
    INaturalist2019DataModule,
    SampleDetection,
    SampleMultiLabel,
    SampleSegmentation,
    SampleTransfer,
    SegmentationFolderDataModule,
    VOCDataModule,
)
from datamodules.generation.images import GenerationDataModule
from datamodules.points.sample import SamplePoints
from datamodules.series.sample import SampleForecasting
from datamodules.super_resolution.folders import ImageFolderSRDataModule
from datamodules.text.sample import SampleGlue
from tests import segmentation_sets as sets
from tests import stand_ins
from tests.datamodules import loading

CLASSES = ("cat", "dog", "fox")
SMALL = {"image_size": 32, "batch_size": 3}
DENSE = {"scale": (120, 80), "crop_size": 64, "batch_size": 1}
LABELLED = {"image", "label", "sample_id", "erased", "noise_seed"}
TOOLKIT = {"inputs", "data_samples"}


def folders(root, train=4, val=2):
    for split, copies in (("train", train), ("val", val)):
        stand_ins.write_classes(root / split, CLASSES, copies)
    return root


def shards(root, write, *names):
    write(folders(root / "folders"), root / "shards", *names)
    return root / "shards"


def inaturalist(root):
    stand_ins.write_inaturalist(root)
    return root


def cifar10(root):
    stand_ins.write_cifar10(root)
    return root


def written(write, root):
    write(root)
    return root


def table(root):
    rows = [f"train/{name}/{n}.JPEG,{name}\n" for name in CLASSES for n in range(4)]
    (folders(root) / "labels.csv").write_text("".join(["image,labels\n", *rows]))
    return root


def pairs(root):
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 44, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
    return root


# Maker of a datamodule, its training and validation samples, entries of a batch, prediction inputs.
SETS = {
    "folder": (lambda r: ImageFolderDataModule(folders(r), **SMALL), 12, 6, LABELLED, "val/cat"),
    "divided": (lambda r: ClassFoldersDataModule(folders(r) / "train", val_share=0.25, **SMALL),
                9, 3, LABELLED, "val/cat"),
    "table": (lambda r: ClassFoldersDataModule(table(r), labels="labels.csv", val_share=0.25,
                                               **SMALL), 9, 3, LABELLED, "val/cat"),
    "parquet": (lambda r: ImageParquetDataModule(
        shards(r, stand_ins.write_parquet, CLASSES), cache_dir=r / "cache", **SMALL),
                12, 6, LABELLED, "folders/val/cat"),
    "tars": (lambda r: ImageTarsDataModule(shards(r, stand_ins.write_tars), **SMALL), 12, 6,
             LABELLED, "folders/val/cat"),
    "inaturalist": (lambda r: INaturalist2019DataModule(inaturalist(r), **SMALL), 6, 6, LABELLED,
                    "train_val2019/Some/2"),
    "cifar10": (lambda r: CIFAR10DataModule(cifar10(r), **SMALL), 20, 4, LABELLED, None),
    "fashion_mnist": (lambda r: FashionMNISTDataModule(
        written(stand_ins.write_fashion_mnist, r), **SMALL), 30, 10, LABELLED, None),
    "elpv": (lambda r: ElpvDataModule(written(stand_ins.write_elpv, r), **SMALL), 32, 8, LABELLED,
             "images"),
    "selected": (lambda r: ImageFolderDataModule(folders(r), selection_share=0.25, **SMALL), 9, 3,
                 LABELLED, "val/cat"),
    "ade20k": (lambda r: ADE20KDataModule(sets.ade20k(r), **DENSE), 3, 3, TOOLKIT,
               "images/training"),
    "voc": (lambda r: VOCDataModule(sets.voc(r), **DENSE), 3, 1, TOOLKIT, "JPEGImages"),
    "cityscapes": (lambda r: CityscapesDataModule(sets.cityscapes(r), **DENSE), 4, 2, TOOLKIT,
                   "leftImg8bit/val"),
    "masks": (lambda r: SegmentationFolderDataModule(sets.folder(r), **DENSE), 2, 2, TOOLKIT,
              "images/val"),
    "segmentation": (lambda r: SampleSegmentation(r, num_train=4, num_val=2, scene_size=96), 4, 2,
                     TOOLKIT, None),
    "detection": (lambda r: SampleDetection(r, num_train=4, num_val=2, scene_size=96), 4, 2,
                  TOOLKIT, None),
    "multi_label": (lambda r: SampleMultiLabel(r, num_train=12, num_val=4), 12, 4, LABELLED, None),
    "transfer": (lambda r: SampleTransfer(r, train_per_class=1, val_per_class=1), 100, 100,
                 LABELLED, None),
    "series": (lambda r: SampleForecasting(r, hours=300, lookback=24, horizon=12), 175, 19,
               {"series", "future", "sample_id"}, None),
    "points": (lambda r: SamplePoints(r, num_train=3, num_val=1, density=20, batch_size=2), 3, 1,
               {"points", "labels", "sample_id"}, None),
    "super_resolution": (lambda r: ImageFolderSRDataModule(pairs(r), scale=2, patch_size=8), 3, 1,
                         {"low", "high", "sample_id"}, "1.png"),
    "generation": (lambda r: GenerationDataModule(
        folders(r), image_size=16, latent_channels=None, factor=1, batch_size=3), 12, 6,
                   {"images", "labels", "sample_id"}, None),
    "glue": (lambda r: SampleGlue(r, num_train=20, num_val=6, max_tokens=32), 20, 6,
             {"tokens", "segments", "mask", "labels", "group", "sample_id"}, None),
}  # fmt: skip


def made(name, root):
    if SETS[name][3] == TOOLKIT:
        pytest.importorskip("mmdet")
        pytest.importorskip("mmseg")
    if name == "parquet":
        pytest.importorskip("datasets")
    data = SETS[name][0](root)
    data.num_workers = 0
    data.setup()
    return data


def flat(batch):
    """All tensors of a batch, by name."""
    values = {key: value for key, value in batch.items() if key != "data_samples"}
    return {key: [*value] if isinstance(value, list) else value for key, value in values.items()}


def check_equal(first, second):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(flat(one), flat(other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SETS)
def test_a_layout_keeps_the_contract(name, tmp_path):
    _, train, val, entries, inputs = SETS[name]
    data = made(name, tmp_path)
    sizes = data.sizes()
    assert (sizes["train"], sizes["val"]) == (train, val)
    data.check_files()
    batches = list(data.val_dataloader())
    assert all({*batch} - {"erased", "noise_seed"} <= entries for batch in batches)
    assert {*next(iter(data.train_dataloader()))} <= entries
    if entries != TOOLKIT:
        order = torch.cat([batch["sample_id"] for batch in batches]).tolist()
        assert order == list(range(val))
        check_equal(batches, list(data.val_dataloader()))
    for split in ("train", "val"):
        copy = pickle.loads(pickle.dumps(data.dataset(split)))
        assert copy.describe(0) == data.dataset(split).describe(0)
        check_equal([copy[3, 1 % val]], [data.dataset(split)[3, 1 % val]])
    alone = list(data.train_dataloader())
    data.num_workers = 2
    check_equal(alone, list(data.train_dataloader()))
    data.num_workers = 0
    assert data.preview_batch(2)
    if entries == LABELLED:
        data.resident = True
        check_equal(batches, list(data.val_dataloader()))
        data.resident = False
    if inputs is not None:
        data.set_predict_inputs(tmp_path / inputs)
        names = data.predict_names()
        assert names
        assert all(str(tmp_path) in file for file in names)
        predicted = list(data.predict_dataloader())
        assert sum(len(next(iter(batch.values()))) for batch in predicted) == len(names)
        assert "unreadable" not in {key for batch in predicted for key in batch}
        assert all(set(batch.get("label", torch.tensor([-1])).tolist()) == {-1}
                   for batch in predicted)  # fmt: skip


KINDS = [getattr(datamodules, name) for name in datamodules.__all__]
REAL = [kind for kind in KINDS if vars(kind).get("example") and "Sample" not in kind.__name__]


@pytest.mark.parametrize("kind", REAL)
def test_a_missing_root_names_an_example(kind, tmp_path):
    loading.rejected(kind, None, f"pass {re.escape(kind.example)}")
    message = "absent is not a folder"
    loading.rejected(kind, tmp_path / "absent", message, error=FileNotFoundError)


DENSE_KINDS = [ADE20KDataModule, VOCDataModule, CityscapesDataModule, SegmentationFolderDataModule]


@pytest.mark.parametrize("kind", [*DENSE_KINDS, CocoDataModule, ImageFolderDataModule])
def test_prediction_works_without_data(kind):
    data = kind(None)
    if hasattr(data, "package"):
        pytest.importorskip(data.package)
    data.predict_only(("a", "b"))
    assert data.class_names == ("a", "b")
