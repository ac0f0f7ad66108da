"""Fashion-MNIST's idx files, and ELPV's table and folds."""

import gzip

import numpy as np
import pytest

from datamodules import ElpvDataModule, FashionMNISTDataModule
from datamodules.images.idx import read_idx
from tests.errors import refuses
from tests.stand_ins import write_elpv, write_fashion_mnist

OPTIONS = {"image_size": 32, "batch_size": 4, "num_workers": 0}


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_idx_files_are_read_gzipped_or_not(pack, tmp_path):
    write_fashion_mnist(tmp_path, pack=pack)
    ending = ".gz" if pack is gzip.compress else ""
    pixels = read_idx(tmp_path / f"t10k-images-idx3-ubyte{ending}")
    assert pixels.shape == (20, 28, 28)
    data = FashionMNISTDataModule(tmp_path, **OPTIONS)
    data.setup()
    assert data.sizes() == {"train": 30, "val": 10, "test": 20}
    sample = data.dataset("test")[0, 3]
    assert sample["label"] == 3
    bytes_ = sample["image"].numpy()
    assert (bytes_[:, 2:-2, 2:-2] == pixels[3]).all()
    assert bytes_[:, :2].max() == bytes_[:, :, -2:].max() == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, "lacks t10k-labels-idx1-ubyte and"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\x14" + bytes(19), "19 values for .*20"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x0d\1\0\0\0\1" + bytes(4), "not an idx file of bytes"),
        ("t10k-labels-idx1-ubyte", b"", "not an idx file of bytes"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\x14" + bytes([10] * 20), "labels above 9"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\2" + bytes(2), r"expected \(2, 28, 28\)"),
        ("train-images-idx3-ubyte.gz", b"\x1f\x8bxx", "train-images-idx3-ubyte.gz"),
    ],
)
def test_damaged_idx_files_are_named(name, content, message, tmp_path):
    write_fashion_mnist(tmp_path)
    (tmp_path / f"{name.removesuffix('.gz')}.gz").unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    data = FashionMNISTDataModule(tmp_path, **OPTIONS)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refused:
        data.setup()
    assert "\n" not in str(refused.value)


def names(data, split):
    dataset = data.dataset(split)
    return [dataset.describe(index) for index in range(len(dataset))]


@pytest.mark.parametrize("classes", [2, 4])
def test_folds_divide_the_cells(classes, tmp_path):
    write_elpv(tmp_path)
    folds = [ElpvDataModule(tmp_path, num_classes=classes, val_fold=k, **OPTIONS)
             for k in range(1, 6)]  # fmt: skip
    tested = []
    for data in folds:
        data.setup()
        assert len(data.class_names) == classes
        assert np.bincount(data.dataset("val").dataset.labels).tolist() == [8 // classes] * classes
        assert not {*names(data, "val")} & {*names(data, "train")}
        tested += names(data, "val")
    assert len(tested) == len(set(tested)) == 40
    table = dict(line.split()[:2] for line in (tmp_path / "labels.csv").read_text().splitlines())
    data = folds[0].dataset("val")
    for index, label in enumerate(data.dataset.labels):
        level = float(table[data.describe(index).removeprefix(f"{tmp_path}/")])
        assert label == (level >= 0.5 if classes == 2 else round(3 * level))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/cell0000.png 0.5 mono", "line 41.* must be 0, 1/3, 2/3 or 1, got 0.5"),
        ("images/cell0000.png 0.0", "line 41"),
        ("images/cell0000.png x mono", "line 41"),
        ("images/cell0000.png 0.0 other", "fewer than data.folds=5 images"),
    ],
)
def test_wrong_tables_are_named(line, message, tmp_path):
    write_elpv(tmp_path)
    with (tmp_path / "labels.csv").open("a") as file:
        file.write(line)
    refuses(message, ElpvDataModule(tmp_path, **OPTIONS).setup)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fold": 6}, "val_fold must be from 1 to 5, got 6"),
        ({"folds": 1}, "folds must be at least 2, got 1"),
        ({"num_classes": 3}, "num_classes must be 2 or 4, got 3"),
    ],
)
def test_unknown_folds_are_refused(options, message):
    refuses(message, ElpvDataModule, **options)


def test_the_package_of_the_cells_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(r"data=elpv needs the package elpv-dataset: type .*\[elpv\]", ElpvDataModule().setup)
