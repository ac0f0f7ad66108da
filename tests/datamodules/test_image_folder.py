"""Class folders: strict decoding, and an explanation for every wrong layout."""

import io
import os
import shutil

import numpy as np
import pytest
import timm.utils.misc
import torchvision.datasets
from PIL import Image, ImageFile
from timm.data.readers.reader_image_folder import ReaderImageFolder

from datamodules import (
    ClassFoldersDataModule,
    ImageFolderDataModule,
    PaperAugmentation,
)
from datamodules.files import headers
from datamodules.files.class_order import natural_key, sort_classes
from datamodules.files.decoding import load_rgb
from datamodules.files.folders import find_images
from datamodules.images.transforms import guarded_posterize
from tests.datamodules import loading
from tests.datamodules.loading import check_both
from tests.numbered import write_folders


def picture(colour=(200, 100, 50), size=(40, 30)):
    return Image.new("RGB", size, colour)


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for index, name in enumerate(("n02", "n01")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for copy in range(3):
                picture((100 * index, 50 * copy, 9)).save(folder / f"{copy}.JPEG")
    return tmp_path


module, ready, rejected, _ = loading.bound(
    ImageFolderDataModule, image_size=32, batch_size=2, num_workers=0
)


def test_repeated_images_are_augmented_differently(root):
    (batch,) = ready(root, batch_size=6, repeated_augmentation=3).train_dataloader()
    first, second = batch["sample_id"].unique().tolist()
    assert sorted(batch["sample_id"].tolist()) == [first] * 3 + [second] * 3
    assert len(batch["image"].flatten(1).unique(dim=0)) == 6


def test_odd_names_and_links(root):
    folder = root / "train/n01"
    picture().save(folder / os.fsdecode(b"caf\xe9.JPEG"))
    (folder / "link.JPEG").symlink_to(folder / "0.JPEG")
    (root / "train/n03").symlink_to(root / "train/n03")
    data = ready(root)
    assert data.class_names == ("n01", "n02")
    assert sum(len(batch["label"]) for batch in data.train_dataloader()) == 8
    (folder / "dangling.JPEG").symlink_to(folder / "gone.JPEG")
    data = ready(root)
    with pytest.raises(FileNotFoundError, match=r"dangling\.JPEG does not exist"):
        list(data.train_dataloader())


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def flat(root):
    picture().save(emptied(root / "val") / "ILSVRC2012_val_00000001.JPEG")


def with_empty_classes(root):
    [(root / "train" / name).mkdir() for name in ("n03", "n04")]


def without(name):
    return lambda root: shutil.rmtree(root / name)


def nothing(root):
    """Leave the set as it is."""


FAULTS = [
    (flat, {}, r"no class folders .*ILSVRC2012_validation_ground_truth"),
    (lambda root: emptied(root / "train"), {}, "has no class folders"),
    (with_empty_classes, {}, r"train has class folders without images .*: n03, n04"),
    (without("train/n01"), {}, "train lacks: n01"),
    (without("val"), {}, "val does not exist; an image folder has"),
    (without("train"), {}, r"train does not exist; .* train/<class>"),
    (lambda root: (root / "valid").mkdir(), {}, "several folders of validation images: val, va"),
    (nothing, {"num_classes": 1000}, r"has 2 class folders but data.num_classes is 1000"),
    (nothing, {"repeated_augmentation": 0}, r"data\.repeated_augmentation=0 is too low"),
    (nothing, {"predict_path": "nothing"}, "must be an image or a folder"),
]


@pytest.mark.parametrize(("change", "options", "message"), FAULTS)
def test_wrong_folders_and_options_are_named(root, change, options, message):
    change(root)
    rejected(root, message, error=(ValueError, FileNotFoundError), **options)


def test_a_class_may_be_absent_in_validation_and_the_folder_be_called_valid(root):
    shutil.rmtree(root / "val/n01")
    (root / "val").rename(root / "valid")
    picture(size=(700, 3)).save(root / "valid/n02/0.JPEG")
    with pytest.warns(UserWarning, match="lacks images of n01"):
        data = ready(root)
    assert [batch["label"].tolist() for batch in data.val_dataloader()] == [[1, 1], [1]]
    assert ready(root, predict_path=root / "valid/n02/1.JPEG").predict_names() == [
        str(root / "valid/n02/1.JPEG")
    ]


def noisy_jpeg():
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (noisy_jpeg()[:1500], "is truncated or damaged"),
        (b"", r"is empty \(0 bytes\)"),
        (b"just text", "is not an image"),
    ],
)
@pytest.mark.parametrize("tolerant", [False, True])
def test_broken_files_are_named(root, monkeypatch, content, reason, tolerant):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", tolerant)
    (root / "val/n01/1.JPEG").write_bytes(content)
    check_both(ready(root), rf"val/n01/1\.JPEG {reason}")
    assert ImageFile.LOAD_TRUNCATED_IMAGES == tolerant


def test_decoding_rules(tmp_path):
    def rgb(image, name="x.png", **options):
        image.save(tmp_path / name, **options)
        return load_rgb(tmp_path / name, upright=False).getpixel((0, 0))

    palette = picture((255, 0, 0)).convert("P")
    palette.info["transparency"] = 0
    assert rgb(Image.new("L", (4, 4), 77)) == (77, 77, 77)
    assert rgb(Image.new("1", (4, 4), 1)) == (255, 255, 255)
    assert rgb(palette) == (255, 0, 0)
    assert rgb(Image.new("RGBA", (4, 4), (1, 2, 3, 0))) == (1, 2, 3)
    assert rgb(Image.fromarray(np.full((4, 4), 0x8000, np.uint16))) == (128, 128, 128)
    assert rgb(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "x.jpg", quality=100)[0] > 250
    frames = [picture((0, 0, 250)), picture((0, 250, 0))]
    assert rgb(frames[0], "x.gif", save_all=True, append_images=frames[1:])[2] > 245
    assert load_rgb(tmp_path / "x.gif", upright=False).mode == "RGB"
    assert rgb(Image.fromarray(np.zeros((4, 4), np.uint16))) == (0, 0, 0)
    for kind in (np.uint16, np.int32):  # 8-bit values in wider types
        with pytest.raises(ValueError, match=r"16 bits .* largest value 250, .* black; save it"):
            rgb(Image.fromarray(np.full((4, 4), 250, kind)), "x.tiff")
    with pytest.raises(ValueError, match="floating-point"):
        rgb(Image.fromarray(np.zeros((4, 4), np.float32)), "x.tiff")


@pytest.mark.parametrize(("upright", "size"), [(False, (40, 30)), (True, (30, 40))])
def test_exif_orientation(tmp_path, upright, size):
    exif = Image.Exif()
    exif[headers.ORIENTATION] = 6
    picture(size=(40, 30)).save(tmp_path / "rotated.jpg", exif=exif)
    assert load_rgb(tmp_path / "rotated.jpg", upright=upright).size == size
    assert headers.read_header(tmp_path / "rotated.jpg", upright=upright)[:2] == size


def test_posterize_guard():
    assert guarded_posterize(picture(), 0).getpixel((0, 0)) == (0, 0, 0)
    assert guarded_posterize(picture(), 8).getpixel((0, 0)) == (200, 100, 50)
    assert guarded_posterize(picture(), 2).getpixel((0, 0)) == (192, 64, 0)


def test_crops_and_interpolation_of_the_papers():
    crop = {"crop_ratio": (0.67, 1.5), "crop_scale": (0.5, 0.9)}
    made = PaperAugmentation(train_interpolation="random", **crop)
    first = made.train(32).transforms[0]
    assert (first.ratio, first.scale) == ((0.67, 1.5), (0.5, 0.9))
    assert {mode.value for mode in first.interpolation} == {"bilinear", "bicubic"}
    assert made.eval(32).transforms[0].interpolation.value == "bicubic"
    usual = PaperAugmentation().train(32).transforms[0]
    assert (usual.ratio, usual.interpolation.value) == ((3 / 4, 4 / 3), "bicubic")


@pytest.mark.parametrize(("share", "each"), [(1.0, 3), (0.5, 2), (0.3, 1), (0.01, 1)])
def test_a_share_takes_the_first_training_images_of_each_class(root, share, each):
    data = ready(root, train_share=share)
    train = data.dataset("train")
    paths = [train.describe(index).partition("train/")[2] for index in range(len(train))]
    assert paths == [f"{name}/{copy}.JPEG" for name in ("n01", "n02") for copy in range(each)]
    assert data.sizes()["val"] == 6


def build_log(caplog, root, **options):
    data = module(root, **options)
    caplog.clear()
    with caplog.at_level("INFO"):
        data.setup()
    return data, caplog.text


def test_nested_images_have_the_outermost_class(root, caplog):
    assert "sub-folders" not in build_log(caplog, root)[1]
    (root / "train/n01/close/blurred").mkdir(parents=True)
    (root / "train/n01/.thumbnails").mkdir()
    for name in ("close/a.JPEG", "close/blurred/b.JPEG", ".thumbnails/c.JPEG"):
        picture().save(root / "train/n01" / name)
    (root / "train/n01/close/again").symlink_to(root / "train/n01")  # an endless loop
    data, lines = build_log(caplog, root)
    train = data.dataset("train")
    found = {train.describe(i): int(train[0, i]["label"]) for i in range(len(train))}
    shutil.rmtree(root / "train/n01/.thumbnails")
    (root / "train/n01/close/again").unlink()
    assert found == dict(torchvision.datasets.ImageFolder(root / "train").samples)
    assert "2 images are in sub-folders (n01/close/a.JPEG, n01/close/blurred/b.JPEG)" in lines
    assert "timm labels by the innermost folder" in lines


def test_skipped_files_are_counted_by_their_endings(root, caplog):
    for name in ("a.txt", "b.TXT", "c.heic", "README", ".d.jpg", ".DS_Store"):
        (root / "train/n01" / name).write_bytes(b"x")
    picture().save(root / "train/stray.png")
    (root / "train/.cache").mkdir()
    data, lines = build_log(caplog, root)
    assert data.sizes() == {"train": 6, "val": 6}
    assert f"{root}/train: 5 files are skipped because of their endings: 2 .txt, 1 " in lines
    assert all(f"1 {kind}" in lines for kind in (".heic", "no ending", "hidden"))
    assert f"{root}/train: 1 image is skipped, outside any class folder: stray.png" in lines
    with caplog.at_level("INFO"):
        assert len(find_images(root / "train/n01")) == 3
    assert f"{root}/train/n01: 5 files are skipped" in caplog.text


def test_unlabelled_images_of_fiftyone_are_skipped(root, caplog):
    """FiftyOne's ImageClassificationDirectoryTree has class folders and ``_unlabeled``."""
    for split in ("train", "val"):
        (root / split / "_unlabeled").mkdir()
        picture().save(root / split / "_unlabeled/new.jpg")
    data, lines = build_log(caplog, root)
    assert data.sizes() == {"train": 6, "val": 6}
    assert "_unlabeled" not in data.class_names
    assert f"{root}/train/_unlabeled is skipped: FiftyOne stores" in lines


@pytest.mark.parametrize(
    "names",
    [[str(number) for number in range(1, 13)], ["Zebra", "ant", "Cat"], ["a10b2", "a10b10", "a9"],
     ["x1", "1x", "x"], ["n02", "n01"]],
)  # fmt: skip
def test_natural_order_equals_timms(names):
    assert sort_classes(names, "natural") == sorted(names, key=timm.utils.misc.natural_key)
    assert sort_classes(names, "text") == sorted(names)
    assert sort_classes(["1", "01", "x²", "x1"], "natural") == ["01", "1", "x1", "x²"]
    assert [natural_key(name)[0] for name in names] == [
        timm.utils.misc.natural_key(name) for name in names
    ]


@pytest.mark.parametrize("kind", [ImageFolderDataModule, ClassFoldersDataModule])
def test_folders_are_numbered_like_torchvision_or_timm(kind, tmp_path):
    write_folders(tmp_path)
    for order, other, theirs in (
        ("text", "natural", torchvision.datasets.ImageFolder(tmp_path / "val")),
        ("natural", "text", ReaderImageFolder(str(tmp_path / "val"))),
    ):
        data = loading.ready(kind, tmp_path, class_order=order, num_workers=0)
        assert {name: label for label, name in enumerate(data.class_names)} == theirs.class_to_idx
        dataset = data.dataset("val")
        for index, label in enumerate(dataset.dataset.labels):
            assert label == theirs.class_to_idx[dataset.describe(index).split("/")[-2]]
        assert list(data.other_orders) == [other]
    with pytest.raises(KeyError, match="size"):
        loading.ready(kind, tmp_path, class_order="size")
