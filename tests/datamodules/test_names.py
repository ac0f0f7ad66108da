"""Names of files and classes from other systems: encodings, accents, backslashes."""

import unicodedata

import pytest
from PIL import Image

from datamodules import (
    ClassFoldersDataModule,
    ImageFolderDataModule,
    SegmentationFolderDataModule,
    VOCDataModule,
)
from tasks.engine.classes import check_classes
from tests.datamodules.loading import ready
from tests.segmentation_sets import folder, voc
from tests.segmentation_sets import ready as dense_ready


def nfd(name):
    return unicodedata.normalize("NFD", name)


def classes(root, names, count=4):
    for place, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (place, number, 9)).save(root / name / f"{number}.png")


def decoded_images(kind, root, **options):
    data = ready(kind, root, image_size=32, batch_size=2, num_workers=0, **options)
    for split in ("train", "val"):
        data.dataset(split)[0, len(data.dataset(split)) - 1]
    return data


def test_class_folders_of_two_systems(tmp_path):
    classes(tmp_path / "train", ["café", "zèbre", "dog"])
    classes(tmp_path / "val", [nfd("zèbre"), nfd("café"), "dog"])
    data = decoded_images(ImageFolderDataModule, tmp_path)
    assert data.class_names == ("café", "dog", "zèbre")
    assert list(data.dataset("val").dataset.labels) == [0] * 4 + [1] * 4 + [2] * 4
    check_classes({"class_names": [nfd("café"), "dog", "zèbre"]}, data.class_names, "last.ckpt")


def test_one_class_in_two_spellings_is_rejected(tmp_path):
    classes(tmp_path, ["café", nfd("café"), "dog"])
    with pytest.raises(ValueError, match=r"two folders of the same name.*: café; move all"):
        decoded_images(ClassFoldersDataModule, tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize(
    ("kind", "make"), [(SegmentationFolderDataModule, folder), (VOCDataModule, voc)]
)
def test_lists_of_classes(tmp_path, kind, make, encoding):
    pytest.importorskip("mmseg")
    names = ["sol", "étang profond", "forêt", *(f"c{number}" for number in range(18))]
    make(tmp_path)
    (tmp_path / "class_names.txt").write_bytes("\r\n".join([*names, ""]).encode(encoding))
    assert dense_ready(kind, tmp_path).class_names == tuple(names)
