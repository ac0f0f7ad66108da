"""Inputs that would fill the memory or never end are rejected early."""

from functools import partial

import numpy as np
import pytest
from PIL import Image, ImageFile
from torchvision import transforms

from datamodules import (
    ClassFoldersDataModule,
    ImageFolderDataModule,
    PaperAugmentation,
)
from datamodules.dense.bgr import load_bgr
from datamodules.dense.coco import CocoDataModule
from datamodules.dense.segmentation_folder import SegmentationFolderDataModule
from datamodules.files.decoding import decode
from datamodules.files.headers import read_header
from datamodules.files.mask_pixels import read_pixels
from datamodules.files.resizing import BoundedResize
from datamodules.loading import memory
from tests.errors import refuses


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 4 * 10**9)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ImageFolderDataModule, {"batch_size": 10**5}, r"100,000 images of 224x224 .*batch_size"),
        (ImageFolderDataModule, {"image_size": 16_384, "batch_size": 2}, "16,384x16,384"),
        (ClassFoldersDataModule, {"eval_batch_size": 10**5}, r"\(data\.eval_batch_size\)"),
        (CocoDataModule, {"scale": 100_000}, r"2 images of 100,000x100,000 .*data\.scale"),
        (CocoDataModule, {"train_sizes": [[99_999, 90_000]]}, "90,000x99,999"),
        (CocoDataModule, {"scale_jitter": [1.0, 100.0]}, "80,000x133,300"),
        (SegmentationFolderDataModule, {"crop_size": 16_384}, "16,384x16,384"),
        (SegmentationFolderDataModule, {"test_scales": [1.0, 50.0]}, "25,600x102,400"),
    ],
)
def test_batches_above_memory_are_rejected(small, kind, options, message):
    refuses(f"a batch of .*{message}", kind, "/data", **options)
    kind("/data", batch_size=2)


def noise(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def torchvisions(size, crop):
    bicubic = transforms.InterpolationMode.BICUBIC
    return transforms.Compose([transforms.Resize(size, bicubic), transforms.CenterCrop(crop)])


@pytest.mark.parametrize(
    "size", [(300, 200), (200, 301), (1, 1), (500, 3), (3, 2001), (300, 1), (1, 400)]
)
def test_ordinary_images_are_resized_like_torchvision(size):
    made = PaperAugmentation().eval(224)
    ours, theirs = transforms.Compose(made.transforms[:2]), torchvisions(248, 224)
    assert ours(noise(*size)).tobytes() == theirs(noise(*size)).tobytes()


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (30_000, 9), (1_999, 301)])
def test_thin_images_compute_only_the_crop(size, monkeypatch):
    crop = (28, 20)
    expected = np.asarray(torchvisions(32, crop)(noise(*size)), np.int64)
    monkeypatch.setattr("datamodules.files.resizing.MAX_PIXELS", 5_000)
    found = BoundedResize(32, crop, transforms.InterpolationMode.BICUBIC)(noise(*size))
    assert found.size == (20, 28)
    found = transforms.CenterCrop(crop)(found)
    assert abs(np.asarray(found, np.int64) - expected).max() <= 1
    made, image = PaperAugmentation(), noise(*size)
    assert made.eval(32)(image).shape == made.train(32)(image).image.shape == (3, 32, 32)


READERS = [decode, read_header, read_pixels, partial(load_bgr, upright=True)]


@pytest.mark.parametrize("read", READERS)
def test_large_images_are_rejected_by_their_headers(tmp_path, read, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("L", (20_000, 20_000)).save(path, compress_level=1)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("it is decoded"))
    for most in (Image.MAX_IMAGE_PIXELS, None):  # other packages raise Pillow's limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        refuses(rf"{path} has more than 178,956,970 pixels", read, path)
