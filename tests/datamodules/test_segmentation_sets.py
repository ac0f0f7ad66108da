"""Cityscapes, Pascal VOC and folders of masks: labels as in mmseg, messages for faults."""

import shutil

import numpy as np
import pytest
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
    logged_lines,
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


FOLDER, VOC, ADE = SegmentationFolderDataModule, VOCDataModule, ADE20KDataModule
NAMES, LIST = "class_names.txt", "ImageSets/Segmentation/train.txt"


def renamed(file, name):
    return lambda root: (root / file).rename((root / file).with_name(name))


def written(file, text):
    return lambda root: (root / file).write_text(text)


def without(pattern):
    return lambda root: [file.unlink() for file in root.glob(pattern)]


def nothing(root):
    """Leave the set as it is."""


# Layout, change of its files, options and message; a missing file is a FileNotFoundError.
FAULTS = [
    (FOLDER, renamed("masks/val/0.png", "0.jpg"), {}, r"0\.png; .*0\.jpg is there, .*lossy"),
    (FOLDER, renamed("masks/train/1.png", "1.gif"), {}, r"1\.gif is there, .*must be PNG; convert"),
    (FOLDER, renamed("masks/train/1.png", "1_gt.png"), {}, r"1 images .*data\.mask_suffix"),
    (FOLDER, without(NAMES), {}, r"1 file does not exist: .*class_names\.txt; write one"),
    (FOLDER, nothing, {"classes": ["a", "a"]}, r"data\.classes must be 1 to 254 different cl"),
    (FOLDER, nothing, {"values": [1, 1, 2]}, r"data\.values must be 3 different numbers, one p"),
    (FOLDER, nothing, {"ignored": [300]}, r"data\.ignored must be numbers from 0 to 255"),
    (VOC, renamed("SegmentationClass/2007_3.png", "2007_3.JPG"), {}, "lossy compression"),
    (VOC, renamed("JPEGImages/2007_3.jpg", "2007_3.jpeg"), {}, "must be 2007_3.jpg"),
    (VOC, nothing, {"train_list": "aug"}, r"list does not .*aug\.txt; pass data\.train"),
    (VOC, written(LIST, "2007_0\n2007_0\n"), {}, r"lists images twice: 2007_0"),
    (VOC, written(LIST, "\n"), {}, "must list images"),
    (ADE, written(NAMES, "sky\nsky\n"), {}, r"must be 1 to 254 different class names, "),
    (ADE, without("images/*/*"), {}, r"images/training holds no \.jpg images"),
    (ADE, without("images/*/1.jpg"), {}, r"1 masks .* lack their images: .*1\.jpg"),
    (ADE, lambda root: (root / "images/training/1.JPG").touch(), {},
     r"files that differ only in their ending"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "options", "message"), FAULTS)
def test_faults_of_files_and_options_are_named(tmp_path, kind, change, options, message):
    change(MAKERS[kind](tmp_path))
    error = (ValueError, FileNotFoundError)
    rejected(kind, tmp_path, message, error=error, **options)


def test_ade20k_labels_equal_mmsegs(tmp_path):
    from mmseg.datasets.transforms import LoadAnnotations

    root = ade20k(tmp_path / "ADEChallengeData2016")
    labels = np.random.default_rng(1).integers(0, 151, SIZE)
    labels[0, :9] = 255
    path = root / "annotations/validation/0.png"
    save(path, labels)
    entry = {"seg_map_path": str(path), "reduce_zero_label": True, "label_map": None}
    expected = LoadAnnotations()(entry | {"seg_fields": []})["gt_seg_map"]
    data = ready(ADE20KDataModule, tmp_path)
    assert np.array_equal(truths(data)[str(root / "images/validation/0.jpg")], expected)
    assert (data.num_classes, data.class_names[:2]) == (150, ("wall", "building"))
    assert data.metainfo["palette"][0] == [120, 120, 120]


def test_flip_mirrors_image_and_labels(tmp_path):
    pixels = np.zeros((*SIZE, 3), np.uint8)
    pixels[:, 30:] = 255
    ade20k(tmp_path)
    for i in range(3):
        Image.fromarray(pixels).save(tmp_path / f"images/training/{i}.jpg", quality=100)
        save(tmp_path / f"annotations/training/{i}.png", np.where(pixels[..., 0] > 0, 2, 1))
    size = {"scale": (60, 40), "crop_size": (40, 60), "scale_jitter": (1, 1)}
    data = ready(ADE20KDataModule, tmp_path, flip=1.0, photometric=False, cat_max_ratio=1.0, **size)
    (image, *_), (sample, *_) = next(iter(data.train_dataloader())).values()
    assert ((image[0] > 128) == (sample.gt_sem_seg.data[0] == 1)).all()
    assert image[0, 0, 0] > 128


def test_absent_classes_ignored_masks_and_small_sets_are_logged(tmp_path, caplog):
    def fill(value, *splits):
        for split in splits:
            for i in range(3):
                save(tmp_path / f"annotations/{split}/{i}.png", np.full(SIZE, value))

    def said(**options):
        return logged_lines(module(ADE20KDataModule, tmp_path, **options), caplog)

    (ade20k(tmp_path) / "class_names.txt").write_text("a\nb\n\nc\n")
    fill(2, "training", "validation")
    assert said() == ["2 of 3 classes do not occur in validation: a, c"]
    fill(0, "training")
    save(tmp_path / "annotations/training/1.png", np.full(SIZE, 255))
    assert said()[0].startswith("All 3 training masks that were checked have only 0 and 255")
    fill(255, "validation")
    assert [line.split(" masks")[0] for line in said()] == ["All 3 validation", "All 3 training"]
    assert said(batch_size=4)[0] == (
        "The training set has 3 images, fewer than data.batch_size=4: each step uses all of them"
    )
    save(tmp_path / "annotations/training/2.png", np.full(SIZE, 3))
    assert len(said()) == 1
