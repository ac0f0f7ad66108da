"""Cityscapes, Pascal VOC and folders of masks: labels as in mmseg, messages for faults."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from datamodules import (
    ADE20KDataModule,
    CityscapesDataModule,
    SegmentationFolderDataModule,
    VOCDataModule,
)
from tests.segmentation_sets import (
    SIZE,
    ade20k,
    cityscapes,
    folder,
    module,
    not_found,
    ready,
    rejected,
    save,
    truths,
    voc,
)

# The function that writes a set, its masks' folder, a mask, and the meaning of labels.
SETS = {
    CityscapesDataModule: (cityscapes, "gtFine/val", "bonn/*0_*labelIds.png",
                           "Cityscapes' label ids are 0 to 33, and 255 is ignored"),
    VOCDataModule: (voc, "SegmentationClass", "*3.png", "21 classes are labelled 0 to 20"),
    SegmentationFolderDataModule: (folder, "masks/val", "0.png", "3 classes are labelled 0 to 2"),
    ADE20KDataModule: (ade20k, "annotations/validation", "1.png", "150 classes "),
}  # fmt: skip
MAKERS = {kind: make for kind, (make, *_) in SETS.items()}


def read_with_mmseg(dataset):
    from mmseg.datasets.transforms import LoadAnnotations

    infos = [dataset.get_data_info(index) for index in range(len(dataset))]
    return {info["img_path"]: LoadAnnotations()(info)["gt_seg_map"] for info in infos}


def check_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, labels in ours.items():
        assert np.array_equal(labels, theirs[name])
        assert len(np.unique(labels)) > 2


@pytest.mark.parametrize("kind", MAKERS)
def test_batches(kind, tmp_path):
    data = ready(kind, MAKERS[kind](tmp_path))
    batch = next(iter(data.train_dataloader()))
    for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
        assert image.dtype == torch.uint8
        assert image.shape[1:] == sample.gt_sem_seg.data.shape[1:]
        assert max(image.shape[1:]) <= 64
    batch = next(iter(data.val_dataloader()))
    assert batch["inputs"][0].shape == (3, 80, 120)
    assert batch["data_samples"][0].gt_sem_seg.data.shape == (1, *SIZE)
    assert len(data.category_ids) == data.num_classes == len(data.metainfo["palette"])
    data.check_files()


@pytest.mark.parametrize("kinds", [("labelIds",), ("labelIds", "labelTrainIds")])
def test_cityscapes_labels_equal_mmsegs(tmp_path, kinds):
    from mmseg.datasets import CityscapesDataset

    data = ready(CityscapesDataModule, cityscapes(tmp_path, kinds))
    assert data.class_names[:2] == ("road", "sidewalk")
    assert len(data.dataset("train")) == 4
    cityscapes(tmp_path, ("labelTrainIds",))  # the only masks that mmseg reads
    theirs = CityscapesDataset(
        data_root=str(tmp_path),
        data_prefix={"img_path": "leftImg8bit/val", "seg_map_path": "gtFine/val"},
        pipeline=[],
    )
    check_same(truths(data), read_with_mmseg(theirs))


def test_voc_labels_equal_mmsegs(tmp_path):
    from mmseg.datasets import PascalVOCDataset

    data = ready(VOCDataModule, voc(tmp_path / "VOCdevkit/VOC2012").parent.parent)
    assert data.class_names[:2] == ("background", "aeroplane")
    names = [data.dataset("train").describe(index)[-5] for index in range(3)]
    assert names == ["2", "0", "1"]  # in the list's order
    theirs = PascalVOCDataset(
        data_root=str(tmp_path / "VOCdevkit/VOC2012"),
        ann_file="ImageSets/Segmentation/val.txt",
        data_prefix={"img_path": "JPEGImages", "seg_map_path": "SegmentationClass"},
        pipeline=[],
    )
    check_same(truths(data), read_with_mmseg(theirs))


def test_folder_with_custom_values(tmp_path):
    folder(tmp_path, values=(10, 20, 30, 40, 255))
    data = ready(SegmentationFolderDataModule, tmp_path, values=[20, 10, 30], ignored=[40])
    for path, labels in truths(data).items():
        mask = path.replace("/images/", "/masks/").replace(".tif", ".png")
        table = {20: 0, 10: 1, 30: 2, 40: 255, 255: 255}
        expected = np.vectorize(table.get)(np.asarray(Image.open(mask)))
        assert np.array_equal(labels, expected)
    assert data.category_ids == (20, 10, 30)


def test_masks_of_other_names(tmp_path):
    folder(tmp_path)
    for mask in list(tmp_path.glob("masks/*/*.png")):
        mask.rename(mask.with_name(f"{mask.stem}_gt.png"))
    kind = SegmentationFolderDataModule
    not_found(kind, tmp_path, r"2 images .* lack their masks.*data\.mask_suffix")
    ready(kind, tmp_path, mask_suffix="_gt")


@pytest.mark.parametrize("kind", MAKERS)
def test_missing_and_wrong_masks_are_named(kind, tmp_path):
    make, masks, mask, meaning = SETS[kind]
    root = make(tmp_path)
    (path,) = (root / masks).glob(mask)
    save(path, np.full(SIZE, 177))
    with pytest.raises(ValueError, match=rf"{path.name} has labels \[177\], but {meaning}"):
        ready(kind, root).check_files()
    save(path, np.zeros((9, 60)))
    with pytest.raises(ValueError, match=rf"{path.name} is \(9, 60\) \(height, width\), but its"):
        ready(kind, root).check_files()
    path.unlink()
    not_found(kind, root, rf"^1 .*{path.name}")
    shutil.rmtree(root / masks)
    not_found(kind, root, rf"^folder .*{masks} does not exist; ")


def test_lists_of_voc(tmp_path):
    root = voc(tmp_path)
    message = r"list .*trainaug\.txt does not exist; pass data\.train_list="
    not_found(VOCDataModule, root, message, train_list="trainaug")
    (root / "ImageSets/Segmentation/train.txt").write_text("2007_0\n2007_0\n")
    rejected(VOCDataModule, root, r"lists images twice: 2007_0")
    (root / "ImageSets/Segmentation/train.txt").write_text("\n")
    rejected(VOCDataModule, root, "must list images")


def test_classes_of_a_folder(tmp_path):
    root = folder(tmp_path)
    kind = SegmentationFolderDataModule
    assert ready(kind, root, classes=["a", "b", "c"]).class_names == ("a", "b", "c")
    rejected(kind, root, r"data\.classes must be 1 to 254 different names", classes=["a", "a"])
    rejected(kind, root, r"data\.values=\[1, 1, 2\] must be 3 different numbers", values=[1, 1, 2])
    with pytest.raises(ValueError, match=r"data\.ignored=\[300\] must be numbers from 0 to 255"):
        module(kind, root, ignored=[300])
    (root / "class_names.txt").unlink()
    not_found(kind, root, r"class_names\.txt does not exist; write one class name per line")


@pytest.mark.parametrize("kind", MAKERS)
def test_prediction_works_without_data(kind):
    data = module(kind, None)
    data.predict_only(("a", "b"))
    assert data.class_names == ("a", "b")
    assert len(data.category_ids) >= 2


def test_folders_may_be_nested_and_called_valid(tmp_path, caplog):
    root = folder(tmp_path)
    for kind, ending in (("images", "tif"), ("masks", "png")):
        (root / kind / "val").rename(root / kind / "valid")
        (root / kind / "valid/north").mkdir()
        (root / kind / f"valid/1.{ending}").rename(root / kind / f"valid/north/0.{ending}")
    (root / "images/train/notes.txt").write_text("x")
    with caplog.at_level("INFO"):
        data = ready(SegmentationFolderDataModule, root)
    names = [Path(path).relative_to(root).as_posix() for path in truths(data)]
    assert names == ["images/valid/0.tif", "images/valid/north/0.tif"]
    assert f"{root}/images/train: 1 file is skipped because of its ending: 1 .txt" in caplog.text
    (root / "masks/val").mkdir()
    message = "several folders of validation images: val, valid; keep"
    rejected(SegmentationFolderDataModule, root, message)


@pytest.mark.parametrize(
    ("kind", "mask", "other", "message"),
    [
        (SegmentationFolderDataModule, "masks/val/0.png", "0.jpg", "lossy compression"),
        (SegmentationFolderDataModule, "masks/train/1.png", "1.gif", "PNG; convert them"),
        (VOCDataModule, "SegmentationClass/2007_3.png", "2007_3.JPG", "lossy compression"),
        (VOCDataModule, "JPEGImages/2007_3.jpg", "2007_3.jpeg", "name must be 2007_3.jpg"),
    ],
)
def test_files_with_other_endings_are_named(tmp_path, kind, mask, other, message):
    root = MAKERS[kind](tmp_path)
    (root / mask).rename((root / mask).with_name(other))
    wanted = rf"{Path(mask).name}; .*\. {(root / mask).with_name(other)} is there, but not used: "
    not_found(kind, root, f"{wanted}.*{message}")
