"""ADE20K: labels as in mmseg, and a message for every fault."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from datamodules import ADE20KDataModule
from tests.segmentation_sets import logged_lines

SPLITS = ("training", "validation")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    generator = np.random.default_rng(0)
    for split in SPLITS:
        (root / "images" / split).mkdir(parents=True)
        (root / "annotations" / split).mkdir(parents=True)
        for i in range(3):
            pixels = generator.integers(0, 255, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / split / f"{i}.jpg")
            save_mask(root, generator.integers(0, 151, (40, 60)), split, i)
    return root


def save_mask(root, labels, split="validation", number=0):
    image = Image.fromarray(np.asarray(labels, dtype=np.uint8))
    image.save(root / "annotations" / split / f"{number}.png")


def module(root, **options):
    defaults = {"scale": (120, 80), "crop_size": 64, "batch_size": 2, "num_workers": 0}
    return ADE20KDataModule(root, **{**defaults, **options})


@pytest.mark.parametrize("parent", [False, True])
def test_batches(root, parent):
    data = module(root.parent if parent else root)
    data.setup()
    assert data.num_classes == 150
    assert data.class_names[:2] == ("wall", "building")
    assert data.metainfo["palette"][0] == [120, 120, 120]
    batch = next(iter(data.train_dataloader()))
    for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
        assert image.dtype == torch.uint8
        assert image.shape[1:] == sample.gt_sem_seg.data.shape[1:]
        assert max(image.shape[1:]) <= 64
    batch = next(iter(data.val_dataloader()))
    assert batch["inputs"][0].shape == (3, 80, 120)
    assert batch["data_samples"][0].gt_sem_seg.data.shape == (1, 40, 60)


def test_labels_equal_mmsegs(root):
    from mmseg.datasets.transforms import LoadAnnotations

    labels = np.random.default_rng(1).integers(0, 151, (40, 60))
    labels[0, :9] = 255
    save_mask(root, labels)
    data = module(root)
    data.setup()
    path = str(root / "annotations/validation/0.png")
    expected = LoadAnnotations()(
        {"seg_map_path": path, "reduce_zero_label": True, "label_map": None, "seg_fields": []}
    )["gt_seg_map"]
    ours = next(iter(data.val_dataloader()))["data_samples"][0].gt_sem_seg.data[0]
    assert np.array_equal(ours.numpy(), expected)
    assert set(np.unique(expected)) <= {*range(150), 255}


def test_flip_mirrors_image_and_labels(root):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, 30:] = 255
    labels = np.where(pixels[..., 0] > 0, 2, 1)
    for i in range(3):
        Image.fromarray(pixels).save(root / f"images/training/{i}.jpg", quality=100)
        save_mask(root, labels, "training", i)
    size = {"scale": (60, 40), "crop_size": (40, 60), "scale_jitter": (1, 1)}
    data = module(root, flip=1.0, photometric=False, cat_max_ratio=1.0, **size)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(
        batch["inputs"][0][0] > 128, batch["data_samples"][0].gt_sem_seg.data[0] == 1
    )
    assert batch["inputs"][0][0, 0, 0] > 128


def test_own_classes(root):
    (root / "class_names.txt").write_text("sky\nsea\n\n")
    for split in SPLITS:
        for i in range(3):
            save_mask(root, np.full((40, 60), 2), split, i)
    data = module(root)
    data.setup()
    assert data.class_names == ("sky", "sea")
    assert len(data.metainfo["palette"]) == 2
    assert next(iter(data.val_dataloader()))["data_samples"][0].gt_sem_seg.data.unique() == 1
    (root / "class_names.txt").write_text("sky\nsky\n")
    with pytest.raises(ValueError, match=r"class_names\.txt must hold .* different class names"):
        module(root).setup()


def test_samples_do_not_depend_on_workers(root):
    def train(workers):
        data = module(root, num_workers=workers)
        data.setup()
        return [image for batch in data.train_dataloader() for image in batch["inputs"]]

    assert all(torch.equal(a, b) for a, b in zip(train(0), train(2), strict=True))


def test_predict(root):
    data = module(root, predict_path=root / "images/training/1.jpg")
    data.setup()
    (batch,) = data.predict_dataloader()
    assert batch["data_samples"][0].img_path.endswith("training/1.jpg")
    assert batch["data_samples"][0].ori_shape == (40, 60)


def test_missing_folders(root, tmp_path):
    with pytest.raises(ValueError, match=r"data=ade20k data.root="):
        module(None).setup()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        module(tmp_path / "absent").setup()
    shutil.rmtree(root / "annotations/validation")
    with pytest.raises(
        FileNotFoundError, match=r"folder .*annotations/validation does not exist; an ADE20K"
    ):
        module(root).setup()


def test_unpaired_files(root):
    (root / "annotations/training/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 images in .* lack their masks: .*2\.png"):
        module(root).setup()
    (root / "images/training/2.jpg").unlink()
    for i in range(7):
        save_mask(root, np.ones((9, 9)), "validation", f"x{i}")
    with pytest.raises(FileNotFoundError, match=r"7 masks .* lack their images: .*\(7 in all\)"):
        module(root).setup()


def test_endings_ignore_case(root):
    names = [pair.image.name for pair in module(root).pairs()["train"]]
    assert "1.jpg" in names
    for kind, ending in (("images", ".jpg"), ("annotations", ".png")):
        file = root / kind / f"training/1{ending}"
        file.rename(file.with_suffix(ending.upper()))
    (pair,) = (pair for pair in module(root).pairs()["train"] if pair.image.stem == "1")
    assert (pair.image.name, pair.mask.name) == ("1.JPG", "1.PNG")
    (root / "images/training/1.jpg").touch()
    with pytest.raises(
        ValueError, match=r"images/training has files that differ only in their ending"
    ):
        module(root).pairs()


def test_no_images(root):
    for split in SPLITS:
        for file in (root / "images" / split).iterdir():
            file.unlink()
    with pytest.raises(ValueError, match=r"no \.jpg images in"):
        module(root).setup()


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
    data = module(root)
    data.setup()
    with pytest.raises(ValueError, match=rf"annotations/validation/1\.png {message}"):
        list(data.val_dataloader())
    with pytest.raises(ValueError, match=rf"annotations/validation/1\.png {message}"):
        data.check_files()


@pytest.mark.parametrize("file", ["images/validation/1.jpg", "annotations/validation/1.png"])
def test_truncated_files_are_named(root, file):
    content = (root / file).read_bytes()
    (root / file).write_bytes(content[: len(content) // 2])
    data = module(root)
    data.setup()
    with pytest.raises(ValueError, match=rf"{file} is truncated"):
        list(data.val_dataloader())
    with pytest.raises(ValueError, match=rf"{file} is truncated"):
        data.check_files()


def test_unintended_data_are_logged(root, caplog):
    (root / "class_names.txt").write_text("a\nb\nc\n")
    for number in range(3):
        save_mask(root, np.full((40, 60), 2), "training", number)
        save_mask(root, np.full((40, 60), 2), "validation", number)
    assert logged_lines(module(root), caplog) == ["2 of 3 classes do not occur in validation: a, c"]
    for number, ignored in enumerate((0, 255, 0)):
        save_mask(root, np.full((40, 60), ignored), "training", number)
    (line, _) = logged_lines(module(root), caplog)
    assert line.startswith("All 3 training masks that were checked have only 0 and 255")
    for number in range(3):
        save_mask(root, np.full((40, 60), 255), "validation", number)
    lines = logged_lines(module(root), caplog)
    assert [line.split(" masks")[0] for line in lines] == ["All 3 validation", "All 3 training"]
    (line, *_) = logged_lines(module(root, batch_size=4), caplog)
    assert line == (
        "The training set has 3 images, fewer than data.batch_size=4: each step uses all of them"
    )
    save_mask(root, np.full((40, 60), 3), "training", 2)
    (line,) = logged_lines(module(root), caplog)
    assert line.startswith("All 3 validation masks")
