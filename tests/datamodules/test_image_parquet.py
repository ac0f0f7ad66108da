"""Parquet shards equal class folders, in any order and process."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from datamodules import ImageFolderDataModule, ImageParquetDataModule
from datamodules.images.synsets import SYNSETS, file_name, to_synsets
from tests.datamodules import loading
from tests.stand_ins import write_classes, write_parquet

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
CLASSES = ("cat", "dog", "fox")


@pytest.fixture
def folders(tmp_path):
    for split, copies in (("train", 4), ("val", 2)):
        write_classes(tmp_path / "folders" / split, CLASSES, copies)
    return tmp_path / "folders"


@pytest.fixture
def shards(folders, tmp_path):
    write_parquet(folders, tmp_path / "shards" / "data", CLASSES)
    return tmp_path / "shards"


SMALL = {"image_size": 32, "batch_size": 3, "num_workers": 0}
_, reference, *_ = loading.bound(ImageFolderDataModule, **SMALL)


def cached(root, **options):
    return ImageParquetDataModule(root, **{"cache_dir": root.parent / "cache", **SMALL, **options})


_, ready, rejected, not_found = loading.bound(cached)


def test_equal_to_class_folders(folders, shards):
    ours, theirs = ready(shards), reference(folders)
    assert ours.class_names == theirs.class_names == CLASSES
    assert ours.sizes() == theirs.sizes() == {"train": 12, "val": 6}
    for split, count in ours.sizes().items():
        mine, other = (
            [(one["label"], one["image"]) for one in map(data.dataset(split).__getitem__, keys)]
            for data in (ours, theirs)
            for keys in [[(1, index) for index in range(count)]]
        )
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert ours.dataset("train").describe(7) == f"{shards}/data/train-00001-of-00002.parquet, row 1"


def test_processes_share_one_copy(shards):
    """Spawned processes get the path of the copy instead of the images."""
    table = ready(shards).dataset("train").dataset.table
    assert len(pickle.dumps(table)) < 5000 < table.data.nbytes
    assert table.cache_files


def test_imagenets_names_become_synsets():
    info = ImageNetInfo()
    names = [info.label_name_to_description(synset) for synset in SYNSETS]
    assert to_synsets([name.upper() for name in names]) == SYNSETS
    assert to_synsets(names[::-1]) == tuple(names[::-1])
    assert to_synsets(["cat", "dog"]) == ("cat", "dog")


def test_column_names_are_options(folders, tmp_path):
    root = tmp_path / "cifar"
    write_parquet(folders, root, None, columns=("img", "fine_label"))
    rejected(root, r"columns img, fine_label and not 'image'.*image_column=")
    options = {"image_column": "img", "label_column": "fine_label"}
    data = ready(root, **options)
    assert data.class_names == ("0", "1", "2")  # numbers, as the shards lack names
    swapped = {"image_column": "fine_label", "label_column": "img"}
    rejected(root, r"cannot copy .* cast from int64 .*by data.image_column", **swapped)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path):
    content = bytearray(path.read_bytes())
    content[4:600] = bytes(596)
    path.write_bytes(content)


FIRST, SECOND = "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: (data / FIRST).unlink(),
         f"1 shards of 2 are missing in .*data: {FIRST}; download them"),
        (lambda data: cut(data / SECOND), f"{SECOND} is not a whole parquet file"),
        (lambda data: spoil(data / "validation-00000-of-00002.parquet"),
         "cannot copy the shards of .*data"),
        (lambda data: (data / FIRST).write_bytes(b""), f"{FIRST} is not a whole parquet file"),
        (lambda data: [path.unlink() for path in data.glob("val*")],
         "lacks validation-\\*.parquet; pass the folder that holds"),
    ],
)  # fmt: skip
def test_incomplete_shards_are_rejected(shards, change, message):
    change(shards / "data")
    assert "\n" not in rejected(shards, message, error=(ValueError, FileNotFoundError))


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([0, -1], None, "must hold class numbers from 0 to 999999, got -1 in row 1"),
        ([-1, -1], CLASSES, "got -1 in row 0"),
        (["cat", "dog"], None, "class numbers from 0 to 999999, got cat in row 0"),
        ([0.0, 1.5], None, "got 1.5 in row 1"),
        ([0, 9], None, r"up to 9, but training has only 2 of them; list all .*ClassLabel"),
        ([0.0, float("nan")], None, "got nan in row 1"),
        ([0, 10**12], None, r"got 1000000000000 in row 1"),
    ],
)
def test_invalid_labels_are_rejected(folders, tmp_path, labels, names, message):
    write_parquet(folders, tmp_path / "bad", names, labels=labels)
    rejected(tmp_path / "bad", message)


def test_classes_without_images_floats_and_broken_images(folders, tmp_path):
    write_parquet(folders, tmp_path / "few", [*CLASSES, "owl"], labels=[0, 1])
    with pytest.warns(UserWarning, match="lacks training images of fox, owl"):
        data = ready(tmp_path / "few")
    assert data.class_names == (*CLASSES, "owl")
    write_parquet(folders, tmp_path / "floats", labels=[1.0, 0.0])
    labels = ready(tmp_path / "floats").dataset("train").dataset.labels
    assert (labels.dtype, labels.tolist()) == (np.int64, [1, 0] * 6)
    (folders / "val" / "cat" / "0.JPEG").write_bytes(b"x")
    write_parquet(folders, tmp_path / "broken", CLASSES)
    message = r"validation-00000-of-00002.parquet, row 0 is not an image"
    with pytest.raises(ValueError, match=message):
        ready(tmp_path / "broken").dataset("val")[0, 0]
    rejected(tmp_path / "broken", r"3 classes but data.num_classes is 1000", num_classes=1000)


def test_a_share_has_the_images_of_class_folders(tmp_path, caplog):
    """Names and images as on Hugging Face, in a different order."""
    caplog.set_level("INFO")
    synsets = ("n01440764", "n01443537")
    for split in ("train", "val"):
        for synset in synsets:
            folder = tmp_path / "folders" / split / synset
            folder.mkdir(parents=True)
            for number in (2, 10, 33, 104, 1000):
                image = Image.new("RGB", (8, 8), (number % 256, 0, 0))
                image.save(folder / f"{synset}_{number}.JPEG")
    theirs = reference(tmp_path / "folders", train_share=0.5)
    files = map(theirs.dataset("train").describe, range(theirs.sizes()["train"]))
    expected = {Path(file).name for file in files}
    for named in (True, False):
        caplog.clear()
        root = tmp_path / f"shards-{named}"
        for split, name in (("train", "train"), ("val", "validation")):
            files = sorted((tmp_path / "folders" / split).rglob("*.JPEG"), reverse=True)
            write_rows(root / f"{name}.parquet", [
                {
                    "image": {
                        "bytes": file.read_bytes(),
                        "path": f"{file.stem}_{file.parent.name}.JPEG" if named else None,
                    },
                    "label": synsets.index(file.parent.name),
                }
                for file in files
            ])  # fmt: skip
        data = ready(root, train_share=0.5)
        train = data.dataset("train").dataset
        assert len(train) == 6
        assert ("lack file names; class folders would give other images" in caplog.text) != named
        if named:
            names = train.file_names()
            assert {file_name(names[row]) for row in train.rows} == expected
            assert "such as n01440764_10.JPEG, as class folders" in caplog.text
        assert data.dataset("train").describe(0).endswith(f"row {train.rows[0]}")


def write_rows(file, rows, meta=None):
    file.parent.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if meta is not None:
        table = table.replace_schema_metadata({"huggingface": meta})
    parquet.write_table(table, file)
