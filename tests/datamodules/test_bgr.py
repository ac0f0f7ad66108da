"""Images in OpenCV's order: Pillow's pixels in the toolkits' memory layout."""

import io
import re
from unittest import mock

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

cv2 = pytest.importorskip("cv2")


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


@pytest.mark.parametrize("strict", [True, False])
def test_opencv_decodes_where_it_is_strict(tmp_path, monkeypatch, strict):
    """Older versions return an image for a truncated file."""
    noise("RGB").save(tmp_path / "x.jpg")
    decoded = None if strict else np.zeros((50, 70, 3), np.uint8)
    monkeypatch.setattr(cv2, "imdecode", lambda content, how: decoded)
    assert bgr.opencv_is_strict.__wrapped__() == strict
    pillow = mock.Mock(return_value=noise("RGB"))
    monkeypatch.setattr(bgr, "opencv_is_strict", lambda: not strict)
    monkeypatch.setattr(bgr, "load_rgb", pillow)
    bgr.load_bgr(tmp_path / "x.jpg", upright=True)
    assert pillow.called == strict


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


def test_segments_after_the_frame_count(tmp_path):
    content = to_file(noise("RGB"), format="JPEG", exif=rotated())
    (exif,) = re.findall(rb"\xff\xe1\x00.Exif.*?(?=\xff\xdb)", content, re.DOTALL)
    plain = content.replace(exif, b"")
    scan = plain.index(b"\xff\xc4")
    assert bgr.is_bare_jpeg(plain)
    (tmp_path / "x.jpg").write_bytes(plain[:scan] + exif + plain[scan:])
    assert not bgr.is_bare_jpeg((tmp_path / "x.jpg").read_bytes())
    pixels = bgr.load_bgr(tmp_path / "x.jpg", upright=True)
    assert np.array_equal(pixels[..., ::-1], load_rgb(tmp_path / "x.jpg", upright=True))
    assert pixels.shape == (70, 50, 3)


@pytest.mark.parametrize("side", [14_000, 60_000])
def test_too_many_pixels_raise_pillows_error(tmp_path, side):
    content = bytearray(to_file(noise("RGB"), format="JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = side.to_bytes(2) * 2
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jpg has more than 178,956,970 pixels"):
        bgr.load_bgr(tmp_path / "x.jpg", upright=True)


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


@pytest.mark.parametrize(
    "turn",
    [lambda x: x[::-1], lambda x: x[..., [2, 0, 1]].transpose(1, 0, 2), lambda x: x[..., ::-1]],
)
def test_other_memory_layouts_are_unchanged(turn):
    image = turn(np.asarray(noise("RGB")))
    assert bgr.to_planes(image) is image
