"""Several labels per image: the forms of the csv file, and its mistakes."""

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ClassFoldersDataModule
from datamodules.images.label_table import read_label_table
from tests.errors import refuses

LISTED = "image,labels\na.png,cat;dog\nb.png,dog\nsub/c.png,bird;cat\nd.png,dog\n"
FLAGGED = "filename, cat, dog\na.png,1,0\nb.png,0,0\nsub/c.png,1,1\nd.png,0,1\n"


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "sub").mkdir()
    for index, name in enumerate(("a.png", "b.png", "sub/c.png", "d.png")):
        Image.new("RGB", (40, 30), (60 * index, 0, 0)).save(tmp_path / name)
    return tmp_path


def read(folder, text, **options):
    (folder / "labels.csv").write_text(text)
    options = {"labels": "labels.csv", "image_size": 32, "num_workers": 0} | options
    data = ClassFoldersDataModule(folder, **options)
    data.setup()
    return data


def labels_of(data):
    found = {}
    for split in ("train", "val"):
        dataset = data.dataset(split)
        for index in range(len(dataset)):
            label = dataset[0, index]["label"]
            assert label.dtype == torch.float32
            found[dataset.describe(index)[-5:]] = label.int().tolist()
    return found


def test_listed_labels_become_flags(photos):
    data = read(photos, LISTED)
    assert data.class_names == ("bird", "cat", "dog")
    assert data.sizes() == {"train": 3, "val": 1}
    assert labels_of(data) == {
        "a.png": [0, 1, 1], "b.png": [0, 0, 1], "c.png": [1, 1, 0], "d.png": [0, 0, 1],
    }  # fmt: skip
    assert read(photos, LISTED.replace(";", "|")).class_names == data.class_names
    spaced = read(photos, LISTED.replace(";", " "), label_separator=" ")
    assert spaced.class_names == data.class_names
    batch = next(iter(read(photos, LISTED, batch_size=3).train_dataloader()))
    assert batch["label"].shape == (3, 3)


@pytest.mark.parametrize("column", ["label", "ill"])
def test_a_single_column_of_0_and_1_is_a_class(photos, column):
    (photos / "labels.csv").write_text(f"filename,{column}\na.png,1\nb.png,0\n")
    table = read_label_table(photos / "labels.csv")
    assert table.names == (column,)
    assert table.labels.tolist() == [[1], [0]]


def test_a_column_divides_the_images(photos, caplog):
    caplog.set_level("INFO")
    rows = [*zip(LISTED.split(), ["split", "train", "val", "TRAIN", "test"], strict=True)]
    data = read(photos, "\n".join(map(",".join, rows)))
    assert data.sizes() == {"train": 2, "val": 1}
    assert "1 images of other splits than train and val are left out" in caplog.text
    lines = data.notices({"train": 2, "val": 1})
    assert any("2 classes do not occur in validation: bird, cat" in line for line in lines)
    assert any("1 images in" in line and "d.png" in line for line in lines)


def test_roboflows_folders_have_a_file_each(photos):
    for split in ("train", "valid"):
        (photos / split).mkdir()
        for name in ("1.jpg", "2.jpg"):
            Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(photos / split / name)
        text = "filename, cat, dog\n1.jpg, 1, 0\n2.jpg, 1, 1\n"
        (photos / split / "_classes.csv").write_text(text)
    data = read(photos, "", labels="_classes.csv")
    assert data.sizes() == {"train": 2, "val": 2}
    (photos / "valid/_classes.csv").write_text("filename, dog, cat\n1.jpg, 1, 0\n")
    with pytest.raises(ValueError, match="has the classes dog, cat, but the training images"):
        read(photos, "", labels="_classes.csv")
    refuses(r"pass task=multi_label data.labels=_classes.csv", read, photos, "", labels=None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LISTED.replace("d.png", "e.png"), "lists 1 of 4 images that .* lacks .*: e.png"),
        (LISTED.replace("d.png", "./b.png"), "lists 1 images more than once .*: b.png"),
        (LISTED.replace("b.png,dog", "b.png,"), "image 2 has an empty or a repeated label"),
        (LISTED.replace("cat;dog", "cat;;dog"), "image 1 has an empty or .*'cat;;dog'"),
        (LISTED.replace("cat;dog", "cat;cat"), "image 1 has an empty or a repeated label"),
        (LISTED.replace("b.png,dog", "b.png,dog|owl"), r"the separators ; and \|; pass the one"),
        (LISTED.replace("cat;dog", "['cat']"), r"has lists in brackets .*; write the labels alone"),
        (
            FLAGGED.replace(", dog", ","),
            r"must name different columns, got \['filename', 'cat', ''",
        ),
        (FLAGGED.replace("1,1", "1,2"), "must hold 1 if .*: image 3 has '2' in column 'dog'"),
        ("image\na.png\n", "needs the image, then a column of labels or"),
        ("image,labels\n", "lists no image below its first line"),
        ("", "is empty; its first line must name the columns"),
        (LISTED.replace("b.png,dog", "b.png,dog,x"), "row 3: 3 cells, but the first row names 2"),
    ],
)
def test_mistakes_are_named(photos, text, said):
    refuses(said, read, photos, text)


def test_missing_files_and_splits_are_named(photos):
    with pytest.raises(FileNotFoundError, match=r"data.labels=x.csv exists neither in"):
        read(photos, LISTED, labels="x.csv")
    text = LISTED.replace("\n", ",test\n").replace("labels,test", "labels,split")
    refuses("without 'train', but with 4 'test'; write train or", read, photos, text)
    with pytest.raises(ValueError, match=r"data.labels must be null with data.token_labels"):
        read(photos, LISTED, token_labels="maps")
