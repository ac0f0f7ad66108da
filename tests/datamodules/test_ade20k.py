"""ADE20K: labels as in mmseg, and a message for every fault."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from datamodules import ADE20KDataModule
from tests import segmentation_sets as sets
from tests.datamodules import loading
from tests.datamodules.loading import check_both
from tests.segmentation_sets import SIZE, ade20k, logged_lines, save

SPLITS = ("training", "validation")


@pytest.fixture
def root(tmp_path):
    return ade20k(tmp_path / "ADEChallengeData2016")


def save_masks(root, value, *splits):
    for split in splits or SPLITS:
        for i in range(3):
            save(root / f"annotations/{split}/{i}.png", np.full(SIZE, value))


module, ready, rejected, not_found = loading.bound(partial(sets.module, ADE20KDataModule))


def test_classes_and_their_colours(root):
    data = ready(root.parent)
    assert data.num_classes == 150
    assert data.class_names[:2] == ("wall", "building")
    assert data.metainfo["palette"][0] == [120, 120, 120]


def test_labels_equal_mmsegs(root):
    from mmseg.datasets.transforms import LoadAnnotations

    labels = np.random.default_rng(1).integers(0, 151, SIZE)
    labels[0, :9] = 255
    path = root / "annotations/validation/0.png"
    save(path, labels)
    entry = {"seg_map_path": str(path), "reduce_zero_label": True, "label_map": None}
    expected = LoadAnnotations()(entry | {"seg_fields": []})["gt_seg_map"]
    ours = next(iter(ready(root).val_dataloader()))["data_samples"][0].gt_sem_seg.data[0]
    assert np.array_equal(ours.numpy(), expected)
    assert set(np.unique(expected)) <= {*range(150), 255}


def test_flip_mirrors_image_and_labels(root):
    pixels = np.zeros((*SIZE, 3), np.uint8)
    pixels[:, 30:] = 255
    for i in range(3):
        Image.fromarray(pixels).save(root / f"images/training/{i}.jpg", quality=100)
        save(root / f"annotations/training/{i}.png", np.where(pixels[..., 0] > 0, 2, 1))
    size = {"scale": (60, 40), "crop_size": (40, 60), "scale_jitter": (1, 1)}
    data = ready(root, flip=1.0, photometric=False, cat_max_ratio=1.0, **size)
    (image, *_), (sample, *_) = next(iter(data.train_dataloader())).values()
    assert torch.equal(image[0] > 128, sample.gt_sem_seg.data[0] == 1)
    assert image[0, 0, 0] > 128


def test_own_classes(root):
    (root / "class_names.txt").write_text("sky\nsea\n\n")
    save_masks(root, 2)
    data = ready(root)
    assert data.class_names == ("sky", "sea")
    assert len(data.metainfo["palette"]) == 2
    assert next(iter(data.val_dataloader()))["data_samples"][0].gt_sem_seg.data.unique() == 1
    (root / "class_names.txt").write_text("sky\nsky\n")
    rejected(root, r"class_names\.txt must hold .* different class names")


def test_predict(root):
    (batch,) = ready(root, predict_path=root / "images/training/1.jpg").predict_dataloader()
    assert batch["data_samples"][0].img_path.endswith("training/1.jpg")
    assert batch["data_samples"][0].ori_shape == SIZE


def test_missing_files_and_folders(root):
    not_found(root / "absent", "is not a folder")
    (root / "images/training/2.jpg").unlink()
    (root / "annotations/training/2.png").unlink()
    for i in range(7):
        save(root / f"annotations/validation/x{i}.png", np.ones((9, 9)))
    not_found(root, r"7 masks .* lack their images: .*\(7 in all\)")
    for file in root.glob("images/*/*"):
        file.unlink()
    rejected(root, r"no \.jpg images in")


def test_endings_ignore_case(root):
    names = [pair.image.name for pair in module(root).pairs()["train"]]
    assert "1.jpg" in names
    for kind, ending in (("images", ".jpg"), ("annotations", ".png")):
        file = root / kind / f"training/1{ending}"
        file.rename(file.with_suffix(ending.upper()))
    (pair,) = (pair for pair in module(root).pairs()["train"] if pair.image.stem == "1")
    assert (pair.image.name, pair.mask.name) == ("1.JPG", "1.PNG")
    (root / "images/training/1.jpg").touch()
    message = r"images/training has files that differ only in their ending"
    with pytest.raises(ValueError, match=message):
        module(root).pairs()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (50, 40)), r"is \(40, 50\) \(height, width\), but its image is \(40, 60\)"),
        (Image.new("L", (60, 40), 151), r"has labels \[151\], but 150 classes .*reduce_zero_label"),
        (Image.new("RGB", (60, 40), (1, 1, 2)), r"is in colours; pass data\.colors=\[\[1,1,2\]\]"),
        (Image.fromarray(np.full((40, 60), 257, np.uint16)), r"has labels \[257\], but 150"),
    ],
)
def test_wrong_masks_are_named(root, mask, message):
    mask.save(root / "annotations/validation/1.png")
    check_both(ready(root), rf"annotations/validation/1\.png {message}")


@pytest.mark.parametrize("file", ["images/validation/1.jpg", "annotations/validation/1.png"])
def test_truncated_files_are_named(root, file):
    content = (root / file).read_bytes()
    (root / file).write_bytes(content[: len(content) // 2])
    check_both(ready(root), rf"{file} is truncated")


def test_absent_classes_ignored_masks_and_small_sets_are_logged(root, caplog):
    (root / "class_names.txt").write_text("a\nb\nc\n")
    save_masks(root, 2)
    assert logged_lines(module(root), caplog) == ["2 of 3 classes do not occur in validation: a, c"]
    save_masks(root, 0, "training")
    save(root / "annotations/training/1.png", np.full(SIZE, 255))
    (line, _) = logged_lines(module(root), caplog)
    assert line.startswith("All 3 training masks that were checked have only 0 and 255")
    save_masks(root, 255, "validation")
    lines = logged_lines(module(root), caplog)
    assert [line.split(" masks")[0] for line in lines] == ["All 3 validation", "All 3 training"]
    (line, *_) = logged_lines(module(root, batch_size=4), caplog)
    assert line == (
        "The training set has 3 images, fewer than data.batch_size=4: each step uses all of them"
    )
    save(root / "annotations/training/2.png", np.full(SIZE, 3))
    (line,) = logged_lines(module(root), caplog)
    assert line.startswith("All 3 validation masks")
