"""Images in OpenCV's order: Pillow's pixels in the toolkits' memory layout."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmseg")

from mmcv.image import imflip
from mmseg.datasets.transforms import PackSegInputs

from datamodules.dense import bgr
from datamodules.dense.toolkit_data import Packed
from datamodules.files.decoding import load_rgb
from tests.errors import refuses


def noise(mode):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"format": "JPEG", "subsampling": 0}),
        ("RGB", {"format": "JPEG", "subsampling": 2, "quality": 40}),
        ("RGB", {"format": "JPEG", "progressive": True}),
        ("RGB", {"format": "JPEG", "exif": rotated()}),
        ("L", {"format": "JPEG"}),
        ("CMYK", {"format": "JPEG"}),
        ("RGBA", {"format": "PNG"}),
        ("P", {"format": "PNG"}),
        ("I;16", {"format": "PNG"}),
    ],
)
@pytest.mark.parametrize("upright", [True, False])
def test_pixels_equal_those_of_pillow(tmp_path, monkeypatch, strict, mode, options, upright):
    monkeypatch.setattr(bgr, "opencv_is_strict", lambda: strict)
    wide = 257 * np.asarray(noise("L")).astype(np.uint16)
    image = Image.fromarray(wide) if mode == "I;16" else noise(mode)
    image.save(tmp_path / "x", **options)
    pixels = bgr.load_bgr(tmp_path / "x", upright=upright)
    expected = np.asarray(load_rgb(tmp_path / "x", upright=upright))
    assert np.array_equal(pixels, expected[..., ::-1])
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


@pytest.mark.parametrize("left", [100, 1500, -2])
def test_truncated_files_are_rejected(tmp_path, left):
    (tmp_path / "x.jpg").write_bytes(to_file(noise("RGB"), format="JPEG")[:left])
    refuses(r"x\.jpg is truncated or damaged", bgr.load_bgr, tmp_path / "x.jpg", upright=True)


def to_file(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("mode", "options", "bare"),
    [
        ("RGB", {"format": "JPEG"}, True),
        ("RGB", {"format": "JPEG", "progressive": True, "restart_marker_rows": 1}, True),
        ("L", {"format": "JPEG", "comment": "by Alice"}, True),
        ("RGB", {"format": "JPEG", "exif": rotated()}, False),
        ("RGB", {"format": "JPEG", "xmp": b"<x/>"}, False),
        ("RGB", {"format": "MPO", "save_all": True, "append_images": [noise("RGB")]}, False),
        ("CMYK", {"format": "JPEG"}, False),
        ("RGB", {"format": "PNG"}, False),
    ],
)
def test_bare_jpegs_lack_an_orientation(mode, options, bare):
    content = to_file(noise(mode), **options)
    assert bgr.is_bare_jpeg(content) == bare
    assert not bgr.is_bare_jpeg(content[1:])
    # An allowed space between segments, and any other end.
    assert not bgr.is_bare_jpeg(content[:2] + b"\xff" + content[2:])
    scan = content.find(b"\xff\xda")
    assert not any(bgr.is_bare_jpeg(content[:end]) for end in range(scan if bare else 200))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("cut", [np.s_[:], np.s_[3:20, 5:30], np.s_[::2]])
@pytest.mark.parametrize("flip", [False, True])
def test_planes_are_views_of_the_image(dtype, cut, flip):
    """Crop by a view like RandomCrop, flip by a view like RandomFlip."""
    image = np.asarray(noise("RGB")).astype(dtype)[cut]
    image = imflip(image) if flip else image
    planes = bgr.to_planes(image)
    assert np.array_equal(planes, image)
    assert planes.transpose(2, 0, 1).flags.c_contiguous
    step = PackSegInputs(meta_keys=())
    assert torch.equal(Packed(step)({"img": image})["inputs"], step({"img": image})["inputs"])
