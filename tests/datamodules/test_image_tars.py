"""Tar files give what class folders give, in any order and in any process."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, ImageTarsDataModule

CLASSES = ("10", "2", "cat")  # timm alone would put 2 before 10


@pytest.fixture
def folders(tmp_path):
    for split, copies in (("train", 3), ("val", 2)):
        for number, name in enumerate(CLASSES):
            (tmp_path / "folders" / split / name).mkdir(parents=True)
            for copy in range(copies):
                colour = (80 * number, 60 * copy, len(split) * 20)
                image = Image.new("RGB", (40, 30), colour)
                image.save(tmp_path / "folders" / split / name / f"{split}_{name}_{copy}.png")
    return tmp_path / "folders"


def in_one(folders, target, split):
    with tarfile.open(target / f"{split}.tar", "w") as tar:
        for path in sorted((folders / split).rglob("*.png")):
            tar.add(path, path.relative_to(folders / split))


def in_shards(folders, target, split):
    (target / split).mkdir()
    paths = sorted((folders / split).rglob("*.png"))
    for shard in range(2):
        with tarfile.open(target / split / f"{shard:03d}.tar", "w") as tar:
            for path in paths[shard::2]:
                tar.add(path, path.relative_to(folders / split))


def by_class(folders, target, split):
    (target / split).mkdir()
    for name in CLASSES:
        with tarfile.open(target / split / f"{name}.tar", "w") as tar:
            for path in sorted((folders / split / name).iterdir()):
                tar.add(path, path.name)


def nested(folders, target, split):
    """As ImageNet's own archive: a tar file of tar files of the classes."""
    by_class(folders, target, split)
    with tarfile.open(target / f"{split}.tar", "w") as tar:
        for path in sorted((target / split).iterdir()):
            tar.add(path, path.name)
            path.unlink()
    (target / split).rmdir()


def module(kind, root, **options):
    data = kind(root, **{"image_size": 32, "batch_size": 2, "num_workers": 0, **options})
    data.setup()
    return data


def by_name(data, split):
    dataset = data.dataset(split)
    samples = [dataset[0, index] for index in range(len(dataset))]
    names = [Path(dataset.describe(index)).name for index in range(len(dataset))]
    return {
        name: (int(sample["label"]), sample["image"])
        for name, sample in zip(names, samples, strict=True)
    }


@pytest.mark.parametrize("pack", [in_one, in_shards, by_class, nested])
def test_equal_to_class_folders(folders, tmp_path, pack):
    target = tmp_path / "tars"
    target.mkdir()
    for split in ("train", "val"):
        pack(folders, target, split)
    ours = module(ImageTarsDataModule, target)
    theirs = module(ImageFolderDataModule, folders)
    assert ours.class_names == theirs.class_names == CLASSES
    assert ours.sizes() == theirs.sizes()
    found, expected = by_name(ours, "val"), by_name(theirs, "val")
    assert found.keys() == expected.keys()
    for name, (label, image) in expected.items():
        assert found[name][0] == label
        assert torch.equal(found[name][1], image)


def test_processes_do_not_share_files(folders, tmp_path):
    for split in ("train", "val"):
        in_shards(folders, tmp_path, split)
    alone = module(ImageTarsDataModule, tmp_path)
    expected = [batch["image"] for batch in alone.train_dataloader()]
    data = module(ImageTarsDataModule, tmp_path, num_workers=2)
    dataset = data.dataset("train")
    dataset[0, 0], dataset[0, 5]  # files are open before the loader's processes begin
    found = [batch["image"] for batch in data.train_dataloader()]
    assert len(found) == len(expected) == 4
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert dataset[0, 3]["sample_id"] == 3


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"data=imagenet_tar data.root="):
        module(ImageTarsDataModule, None)
    with pytest.raises(FileNotFoundError, match="no tar files of train; it needs"):
        module(ImageTarsDataModule, folders)
    target = tmp_path / "tars"
    target.mkdir()
    for split in ("train", "val"):
        in_one(folders, target, split)
    with pytest.raises(ValueError, match=r"3 classes but data.num_classes is 1000"):
        module(ImageTarsDataModule, target, num_classes=1000)

    def rewrite(name, content):
        with tarfile.open(target / "val.tar", "w") as tar:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

    rewrite("dog/0.png", b"x")
    with pytest.raises(ValueError, match="classes that training lacks: dog"):
        module(ImageTarsDataModule, target)
    for content, message in ((b"x", "is no image"), (b"", "is empty")):
        rewrite("cat/0.png", content)
        data = module(ImageTarsDataModule, target)
        with pytest.raises(ValueError, match=rf"val.tar/cat/0.png {message}"):
            data.dataset("val")[0, 0]
    whole = next((folders / "val/cat").iterdir()).read_bytes()
    rewrite("cat/0.png", whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cat/0.png is truncated or damaged"):
        module(ImageTarsDataModule, target).dataset("val")[0, 0]
    rewrite("readme.txt", b"x")
    with pytest.raises(ValueError, match="no images in its tar files"):
        module(ImageTarsDataModule, target)
    (target / "val.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match="a tar file is damaged"):
        module(ImageTarsDataModule, target)


def test_label_maps_are_of_class_folders(folders, tmp_path):
    for split in ("train", "val"):
        in_one(folders, tmp_path, split)
    data = module(ImageTarsDataModule, tmp_path, token_labels=str(tmp_path))
    with pytest.raises(ValueError, match=r"data=imagenet and data=folder .*token_labels=null"):
        data.check_files()
