"""Any folder of classes: drawn validation images, and rejected layouts."""

import pytest
from PIL import Image

from datamodules import ClassFoldersDataModule
from tests.datamodules import loading


def write(folder, counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            colour = (number, len(name), 9)
            Image.new("RGB", (8, 8), colour).save(folder / name / f"{number:03d}.png")


module, ready, rejected, not_found = loading.bound(
    ClassFoldersDataModule, image_size=32, batch_size=4, num_workers=0
)


def paths(data, split):
    dataset = data.dataset(split)
    return {dataset.describe(index) for index in range(len(dataset))}


@pytest.mark.parametrize("inner", ["", "train"])
def test_a_share_of_each_class_validates(tmp_path, inner, caplog):
    write(tmp_path / inner, {"cat": 20, "dog": 40, "owl": 3})
    caplog.set_level("INFO")
    data = ready(tmp_path, val_share=0.1)
    assert data.class_names == ("cat", "dog", "owl")
    train, val = paths(data, "train"), paths(data, "val")
    assert not train & val
    assert len(train | val) == 63
    assert sorted(data.dataset("val").dataset.labels) == [0, 0, 1, 1, 1, 1, 2]
    for split in ("train", "val"):
        for index, label in enumerate(data.dataset(split).dataset.labels):
            assert f"/{data.class_names[label]}/" in data.dataset(split).describe(index)
    assert "7 of its 63 images validate (data.val_share=0.1, data.split_seed=0)" in caplog.text
    assert paths(ready(tmp_path), "val") == val
    assert paths(ready(tmp_path, split_seed=1), "val") != val
    assert paths(ready(tmp_path, split_seed=0, seed=5), "val") == val


def test_added_images_leave_most_others_in_place(tmp_path):
    write(tmp_path, {"cat": 100, "dog": 100})
    before = paths(ready(tmp_path, val_share=0.2), "val")
    for number in range(100, 110):
        Image.new("RGB", (8, 8)).save(tmp_path / "cat" / f"{number:03d}.png")
    after = paths(ready(tmp_path, val_share=0.2), "val")
    assert len(after) == 42
    assert len(before - after) <= 4  # a draw from the list of names would move 16 of the 20 cats
    assert {path for path in before if "/dog/" in path} <= after


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({}, {}, "no class folders"),
        ({"cat": 5, "dog": 1}, {}, r"fewer than two images, .*: dog"),
        ({"cat": 5, "dog": 2}, {"num_classes": 3}, r"2 class folders but data.num_classes is 3"),
        ({"Train/cat": 4, "Val/cat": 4}, {}, "class folders in names of splits .*: Train, Val"),
        ({"TRAIN/cat": 4, "testing/cat": 4}, {}, "names of splits .*: TRAIN, testing"),
    ],
)
def test_indivisible_folders_are_rejected(tmp_path, counts, options, message):
    write(tmp_path, counts)
    rejected(tmp_path, message, **options)
