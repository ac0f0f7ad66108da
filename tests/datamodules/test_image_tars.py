"""Tar files equal class folders, in any order and process."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, ImageTarsDataModule
from datamodules.images import tar_shards
from datamodules.images.robustness_sets import SYNSETS
from datamodules.images.tar_index import read_member
from datamodules.images.tar_shards import KEY
from tests.datamodules import loading

CLASSES = ("10", "2", "cat")  # timm alone sorts 2 before 10
SPLITS = ("train", "val")
OPTIONS = {"image_size": 32, "batch_size": 2, "num_workers": 0}
_, ready, rejected, _ = loading.bound(ImageTarsDataModule, **OPTIONS)
_, reference, *_ = loading.bound(ImageFolderDataModule, **OPTIONS)


@pytest.fixture
def folders(tmp_path):
    for split, copies in (("train", 3), ("val", 2)):
        for number, name in enumerate(CLASSES):
            (tmp_path / "folders" / split / name).mkdir(parents=True)
            for copy in range(copies):
                image = Image.new("RGB", (40, 30), (80 * number, 60 * copy, len(split) * 20))
                image.save(tmp_path / "folders" / split / name / f"{split}_{name}_{copy}.png")
    return tmp_path / "folders"


def add_all(file, paths, above):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for path in paths:
            tar.add(path, path.relative_to(above))


def in_one(folders, target, split):
    add_all(target / f"{split}.tar", sorted((folders / split).rglob("*.png")), folders / split)


def in_shards(folders, target, split):
    paths = sorted((folders / split).rglob("*.png"))
    for shard in range(2):
        add_all(target / split / f"{shard:03d}.tar", paths[shard::2], folders / split)


def by_class(folders, target, split):
    for folder in (folders / split).iterdir():
        add_all(target / split / f"{folder.name}.tar", sorted(folder.iterdir()), folder)


def nested(folders, target, split):
    by_class(folders, target.parent / "inner", split)
    inner = target.parent / "inner" / split
    add_all(target / f"{split}.tar", sorted(inner.iterdir()), inner)


def by_name(data):
    dataset = data.dataset("val")
    samples = {Path(dataset.describe(i)).name: dataset[0, i] for i in range(len(dataset))}
    return {name: (int(sample["label"]), sample["image"]) for name, sample in samples.items()}


@pytest.mark.parametrize("write", [in_one, in_shards, by_class, nested])
def test_equal_to_class_folders(folders, tmp_path, write):
    for split in SPLITS:
        write(folders, tmp_path / "tars", split)
    ours, theirs = ready(tmp_path / "tars"), reference(folders)
    assert ours.class_names == theirs.class_names == CLASSES
    assert ours.sizes() == theirs.sizes()
    torch.testing.assert_close(by_name(ours), by_name(theirs), rtol=0, atol=0)


def pack(file, content):
    """Write a tar file of these members: text, json objects, or images by number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, value in content.items():
            data = value if isinstance(value, bytes) else encoded(name, value)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def encoded(name, value):
    if isinstance(value, dict):
        return json.dumps(value).encode()
    if isinstance(value, str):
        return value.encode()
    file = io.BytesIO()
    kind = {"jpg": "jpeg", "jfif": "jpeg", "pgm": "ppm"}
    ending = name.rpartition(".")[2].lower()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(file, kind.get(ending, ending))
    return file.getvalue()


PIXELS = encoded("0.jpg", 0)


def shard(labels, start=0, ending="jpg"):
    """Write samples of WebDataset; an image's red is ten times its label."""
    content = {}
    for number, label in enumerate(labels, start):
        content |= {f"{number:06d}.{ending}": 10 * label, f"{number:06d}.cls": f"{label}\n"}
    return content


def webdataset(root):
    """Write two numbered shards to train and one to validate, of classes 0 to 11."""
    pack(root / "train/train-000000.tar", shard(range(6)))
    pack(root / "train/train-000001.tar", shard(range(6, 12)))
    pack(root / "val/val-000000.tar", shard(range(12), ending="png"))
    return root


def pack_both(root, content, name="000000.tar"):
    for split in SPLITS:
        pack(root / split / name, content)


def labels_by_red(data, split):
    dataset = data.dataset(split)
    images, found = dataset.dataset, {}
    for index in range(len(dataset)):
        content = read_member(
            images.archives[images.archive[index]], *images.places[index].tolist()
        )
        red = Image.open(io.BytesIO(content)).getpixel((0, 0))[0]
        found[round(red / 10)] = int(dataset[0, index]["label"])
    return found


def test_webdatasets_numbers_are_the_labels(tmp_path):
    data = ready(webdataset(tmp_path))
    assert data.class_names == tuple(map(str, range(12)))
    for split in SPLITS:
        assert labels_by_red(data, split) == {label: label for label in range(12)}
    assert data.other_orders == {}
    place = f"{tmp_path}/train/train-000001.tar/000000.jpg"
    assert data.dataset("train").describe(6) == place
    names = [f"class {number}" for number in range(12)]
    (tmp_path / "classnames.txt").write_text("\n".join(names))
    data = ready(tmp_path)
    assert data.class_names == tuple(names)
    assert labels_by_red(data, "val") == {label: label for label in range(12)}


def test_the_label_may_be_a_field_of_the_json(tmp_path, caplog):
    pack_both(tmp_path, {
        "a/1.webp": 0, "a/1.json": {"label": 0, "text": "x"}, "a/1.txt": "a caption",
        "a/2.jpeg": 10, "a/2.json": {"label": 1.0}, "__index__": "x",
        "b/1.png": 20, "b/1.json": {"label": "2"}, "b/3.seg.png": 90, "b/3.jpg": 10,
        "b/3.json": {"label": "dog"}, "b/1.txt": "a caption",
    })  # fmt: skip
    caplog.set_level("INFO")
    assert ready(tmp_path).class_names == ("a", "b")
    said = "have .json members (label, text); pass data.label_key=<field> to use those"
    assert said in caplog.text
    (tmp_path / "classnames.txt").write_text("cat\ndog\nfox\n")
    data = ready(tmp_path, label_key="label")
    assert data.class_names == ("cat", "dog", "fox")
    assert data.dataset("train").dataset.labels.tolist() == [0, 1, 2, 1]
    for names, options, message in (
        ("cat dog fox", {"label_key": "class"}, "lacks the field 'class'; it has: label, text"),
        ("cat fox owl", {"label_key": "label"}, r"3\.jpg has the label 'dog'; .* lists 3 cl"),
    ):
        (tmp_path / "classnames.txt").write_text(names.replace(" ", "\n"))
        rejected(tmp_path, message, **options)


OK = {"0.jpg": 0, "0.cls": "0", "1.jpg": 10, "1.cls": "1"}
BOTH = {"train/0.tar": OK, "val/0.tar": OK}
NESTED = {"0.jpg": 0, "0.json": {"a": {"b": 0, "c": 1}}}


def broken(content):
    return {"train/0.tar": OK | content, "val/0.tar": OK}


# Files of a set (bytes, or members of a tar file), the message, and options.
FAULTS = [
    ({}, "lacks plain tar files of train; it needs", {}),
    (BOTH, r"2 classes but data.num_classes is 1000", {"num_classes": 1000}),
    (BOTH, r"data\.train_share must be above 0", {"train_share": 0}),
    ({"train.tar": {"a/0.png": 0}, "val.tar": {"dog/0.png": 0}}, "training lacks: dog", {}),
    ({"train.tar": {"a/0.png": 0}, "val.tar": {"readme.txt": "x"}}, "of val that lack images", {}),
    ({"train.tar": {"a/0.png": 0}, "val.tar": b"no tar" * 200}, "compressed or damaged", {}),
    *(({name.format("train"): b""}, r"and has compressed ones \(.*\): unpack them", {})
      for name in ("{}/0.tar.gz", "{}/0.tgz", "{}-0000.tar.xz", "{}.tar.zst")),
    ({**BOTH, "train/1.tgz": b""}, r"plain and compressed tar files of train .*: train/1.tgz", {}),
    ({**BOTH, "validation/0.tar": OK}, "of several names, .*: val, validation", {}),
    ({**BOTH, "val/0.tar": {"0/0.jpg": 1}}, r"mixes two layouts .* labels: .*val/0\.tar", {}),
    ({"train/000000.tar": {"0/0.jpg": 1, "stray.jpg": 2}, "val/000000.tar": OK}, "mixes two", {}),
    *(({name.format(split): {"0.jpg": 1, "1.jpg": 2} for split in SPLITS},
       r"has images without a class; tar files need <class>/", {})
      for name in ("{0}/train-000000.tar", "{}/000000.tar", "{}/00.tar", "{}/shard_1.tar", "{}.tar",
                   "{}-0.tar", "{}/mine-00.tar", "{}/chunk0.tar")),
    ({"train/0.tar": NESTED, "val/0.tar": OK}, r"key=a\.<field> with one of: b, c",
     {"label_key": "a"}),
    ({"train/0.tar": NESTED, "val/0.tar": OK}, r"lacks the field 'a\.d'; it has: b, c",
     {"label_key": "a.d"}),
    ({"train/0.tar": {"1.jpg": 0, "1.json": {"label": 0, "text": "x"}}, "val/0.tar": NESTED},
     r"pass data\.label_key=.* one of: label, text", {}),
    ({"train/0.tar": {"1.jpg": 0, "1.json": {"label": True}}, "val/0.tar": NESTED},
     r"'label' in its \.json must be the number or name of a cl", {"label_key": "label"}),
    *((broken(content), message, {}) for content, message in (
        ({"2.jpg": 1}, r"sample '2': it lacks a \.cls member \(\.jpg\); write one, or pass data"),
        ({"2.cls": "1"}, r"sample '2': it lacks an image \(\.cls\)"),
        ({"2.heic": "x", "2.cls": "1"}, r"sample '2': it lacks an image \(\.heic, \.cls\)"),
        ({"2.jpg": 1, "2.png": 1, "2.cls": "1"}, r"several images \(\.jpg, \.png, \.cls\)"),
        ({"a.2.jpg": 1, "a.2.cls": "1"}, r"keys end at the first dot of a file name"),
        ({"2.jpg": 1, "2.cls.txt": "1"}, r"lacks a \.cls member \(\.jpg, \.cls\.txt\)"),
        ({"2.jpg": 1, "2.JPG": 1, "2.cls": "1"}, r"several members of one kind"),
        ({"2.jpg": 1, "2.cls": ""}, r"its \.cls must hold the number of a class; got b''"),
        ({"2.jpg": 1, "2.cls": b"\xff\xfe1"}, r"its \.cls must hold the number of a class"),
        ({"2.jpg": 1, "2.cls": "cat"}, r"2\.jpg has the label 'cat'; without classnames\.txt"),
        ({"2.jpg": 1, "2.cls": "-1"}, r"2\.jpg has the label -1; without classnames\.txt"),
        ({"2.jpg": 1, "2.cls": "9"}, r"labels up to 9, but training has only 3 of them; list"),
    )),
    *(({**BOTH, "classnames.txt": names}, r"classnames\.txt (lists 1|must have one name per)", {})
      for names in (b"a", b"a\nb\n\nc", b"a\nb\nb", b"")),
]  # fmt: skip


@pytest.mark.parametrize(("files", "message", "options"), FAULTS)
def test_faults_of_tar_files_are_named(files, message, options, tmp_path):
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        else:
            pack(tmp_path / name, content)
    rejected(tmp_path, message, error=(ValueError, FileNotFoundError), **options)


def test_broken_images_are_named(tmp_path):
    for content, message in (
        (b"x", "is not an image"),
        (b"", "is empty"),
        (PIXELS[: len(PIXELS) // 2], "is truncated or damaged"),
    ):
        pack(tmp_path / "train.tar", {"cat/0.jpg": 1})
        pack(tmp_path / "val.tar", {"cat/0.jpg": content})
        with pytest.raises(ValueError, match=rf"val.tar/cat/0.jpg {message}"):
            ready(tmp_path).dataset("val")[0, 0]
    message = r"data=imagenet, data=folder or data.token_labels=null"
    with pytest.raises(ValueError, match=message):
        ready(tmp_path, token_labels=str(tmp_path)).check_files()


def test_gaps_in_the_numbers_of_shards_are_reported(tmp_path):
    (webdataset(tmp_path) / "train.tar.gz").write_bytes(b"")  # the archive of the shards
    pack(tmp_path / "train/train-000004.tar", shard(range(3)))
    with pytest.warns(UserWarning, match=r"in its numbering: train-000002\.tar, train-000003\.tar"):
        assert ready(tmp_path).sizes()["train"] == 15


def test_damaged_tar_files_are_rejected(folders, tmp_path):
    for split in SPLITS:
        in_one(folders, tmp_path, split)
    whole = (tmp_path / "train.tar").read_bytes()
    second = [offset for offset in range(512, len(whole), 512) if b"ustar" in whole[offset:][:512]]
    damaged = bytearray(whole)
    damaged[second[1] : second[1] + 100] = b"x" * 100
    for content, message in (
        (bytes(damaged), "or data follow it"),  # tarfile stops there silently
        (whole[: second[3]], "its end mark is missing"),
        (whole[: second[3] - 512], "damaged"),
        (whole + whole, "or data follow it"),
        (b"\x1f\x8b" + whole, "is compressed or damaged .*; unpack it"),
    ):
        (tmp_path / "train.tar").write_bytes(content)
        rejected(tmp_path, message)


@pytest.fixture
def indexed(tmp_path, monkeypatch):
    """Return a data set whose tar files all count as large, and the folder of their indices."""
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tar_shards, "KEPT_FROM", 1)
    return webdataset(tmp_path / "data"), tmp_path / "cache/tar-indices"


def test_the_index_of_a_large_file_is_cached(indexed, monkeypatch):
    root, indices = indexed
    first = ready(root)
    assert len(list(indices.glob("*.json"))) == 3
    monkeypatch.setattr(tar_shards, "_read_shard", None)
    again = ready(root)
    assert labels_by_red(again, "train") == labels_by_red(first, "train")
    assert again.class_names == first.class_names


@pytest.mark.parametrize("name", ["a.jpg", "d.e/a.b.jpg", "d/a", "a.tar.gz", "x/y/z.cls"])
def test_keys_equal_webdatasets(name):
    """Source: webdataset/tariterators.py, base_plus_ext."""
    theirs = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    ours = KEY.fullmatch(name)
    assert (ours and ours.groups()) == (theirs and theirs.groups())


def test_imagenets_shards_have_its_classes(tmp_path):
    content = {}
    for label, synset in enumerate(SYNSETS):
        content |= {f"{synset}_{label}.jpg": PIXELS, f"{synset}_{label}.cls": str(label)}
    for split in ("train", "validation"):
        pack(tmp_path / f"imagenet1k-{split}-0000.tar", content)
    assert ready(tmp_path, num_classes=1000).class_names == SYNSETS
