"""Data of super-resolution: MATLAB's imresize, patches, folders, images to enlarge."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from datamodules.loading.sampling import restored_generators, seed_generators
from datamodules.sample.digits import PHOTO_COLUMNS
from datamodules.super_resolution.folders import (
    BenchmarkDataModule,
    DF2KDataModule,
    DIV2KDataModule,
    ImageFolderSRDataModule,
    find_pairs,
)
from datamodules.super_resolution.imresize import crop_to_multiple, downscale, imresize
from datamodules.super_resolution.pairs import (
    Pair,
    Patches,
    shrunk_patch,
)
from datamodules.super_resolution.reading import array_pixels, collect, read_pixels
from datamodules.super_resolution.sample import CROP, SampleSuperResolution, parts
from tests.errors import refuses
from tests.families import rest_slow_pairs
from tests.references import super_resolution as plain


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height, width):
    """A photograph-like image without fine detail."""
    rows, columns = np.mgrid[:height, :width] / 40
    waves = np.stack([np.sin(rows + columns), np.cos(rows - columns), np.sin(rows * columns)], -1)
    return np.round(127.5 + 100 * waves).astype(np.uint8)


@pytest.mark.parametrize("factor", [1 / 2, 1 / 3, 1 / 4, 2, 3, 4])
@pytest.mark.parametrize("size", [(12, 24), (1, 5)])
def test_imresize_equals_matlabs_formula(factor, size):
    image = noise(*size) / 255
    ours, theirs = imresize(image, factor), plain.imresize(image, factor)
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).max() < 1e-12


def test_integers_are_rounded_once_and_clipped():
    image = noise(24, 36)
    exact = plain.imresize(image.astype(float), 1 / 3)
    assert np.array_equal(downscale(image, 3), np.floor(exact + 0.5).clip(0, 255))
    deep = image.astype(np.uint16) * 257
    assert downscale(deep, 3).dtype == np.uint16


def test_shrinking_and_enlarging_share_pixel_centres():
    """Public trap: a shift of half a pixel costs decibels."""
    image = smooth(96, 96)
    for scale in (2, 3, 4):
        back = imresize(downscale(image, scale), scale).astype(float)
        error = back - image
        shifted = np.roll(back, 1, axis=1) - image
        assert (error**2).mean() < (shifted**2).mean() / 10


def test_a_patch_is_that_of_the_whole_shrunk_image():
    image = noise(60, 84)
    for scale in (2, 3, 4):
        whole = downscale(image, scale)
        rows, columns = whole.shape[0] - 6, whole.shape[1] - 6
        for place in ((0, 0), (rows, columns), (rows // 2, 1)):
            patch = shrunk_patch(image, scale, place, 6)
            wanted = whole[place[0] : place[0] + 6, place[1] : place[1] + 6]
            assert np.array_equal(patch, wanted), (scale, place)


@pytest.fixture
def folder(tmp_path):
    """Three images of odd sizes."""
    for index, size in enumerate([(50, 61), (49, 70), (64, 66)]):
        Image.fromarray(noise(*size, seed=index)).save(tmp_path / f"{index}.png")
    return tmp_path


def add_low(folder, scale, wrong=()):
    """Move the images into HR and put their small ones beside them."""
    high, low = folder / "HR", folder / f"LR_bicubic/X{scale}"
    high.mkdir()
    low.mkdir(parents=True)
    for file in sorted(folder.glob("*.png")):
        image = crop_to_multiple(np.asarray(Image.open(file)), scale)
        small = downscale(image, scale)
        small = small[:-1] if file.stem in wrong else small
        Image.fromarray(small).save(low / f"{file.stem}x{scale}.png")
        file.rename(high / file.name)


@pytest.mark.parametrize(
    ("scale", "given"),
    rest_slow_pairs([(s, g) for s in (2, 3, 4) for g in (False, True)], [(4, False), (3, True)]),
)
def test_whole_images_are_cropped_to_a_multiple_of_the_scale(folder, scale, given):
    if given:
        add_low(folder, scale)
    data = ImageFolderSRDataModule(folder, scale=scale, patch_size=8, val_share=0.3)
    data.setup()
    data.check_files()
    assert data.sizes() == {"train": 2, "val": 1}
    (batch,) = data.val_dataloader()
    height, width = 64 // scale, 66 // scale
    assert batch["low"].shape == (1, 3, height, width)
    assert batch["high"].shape == (1, 3, scale * height, scale * width)
    high = noise(64, 66, seed=2)[: scale * height, : scale * width]
    floats = data.normalise(batch)
    for key, pixels in (("high", high), ("low", downscale(high, scale))):
        assert np.array_equal(batch[key][0].permute(1, 2, 0), pixels)
        assert np.array_equal(floats[key][0].permute(1, 2, 0), pixels / np.float32(255))


@pytest.mark.parametrize("given", [False, True])
def test_patches_are_pairs_and_are_turned_together(folder, given):
    if given:
        add_low(folder, 2)
    files = sorted((folder / "HR" if given else folder).glob("*.png"))
    low = folder / "LR_bicubic/X2"
    pairs = [Pair(one, low / f"{one.stem}x2.png" if given else None) for one in files]
    patches = Patches(pairs, 2, 8, 50, True)
    assert len(patches) == 150
    plain_patches = Patches(pairs, 2, 8, 50, False)
    seen = set()
    for index in range(40):
        with restored_generators():
            seed_generators([index] * 3)
            sample = patches[index]
            seed_generators([index] * 3)
            upright = plain_patches[index]
        assert sample["high"].shape == (3, 16, 16)
        turned = {
            (turns, flip): [
                (lambda x: x.flip(-1) if flip else x)(torch.rot90(upright[key], turns, (1, 2)))
                for key in ("low", "high")
            ]
            for turns in range(4)
            for flip in (False, True)
        }
        found = [
            how for how, (low, high) in turned.items()
            if torch.equal(low, sample["low"]) and torch.equal(high, sample["high"])
        ]  # fmt: skip
        assert found
        seen.add(found[0])
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: (root / "LR_bicubic/X2/1x2.png").unlink(), "lacks images of .*: 1x2"),
        (lambda root: (root / "HR/1.png").unlink(), "has images that .* lacks .*: 1x2"),
        (lambda root: [one.unlink() for one in (root / "HR").iterdir()], "holds no images"),
    ],
)
def test_names_that_differ_are_an_error(folder, change, said):
    add_low(folder, 2)
    change(folder)
    with pytest.raises(ValueError, match=said):
        ImageFolderSRDataModule(folder, scale=2).setup()


@pytest.mark.parametrize(
    ("high", "low", "name"),
    [
        ("HR", "LR_bicubic/X2", "{}x2"),
        ("HR", "LR_bicubic_X2", "{}"),
        ("GT", "LRBI/x2", "{}_LRBI_x2"),
        ("GTmod12", "LRbicx2", "{}"),
        ("HR", "LR/X2", "{}_x2"),
    ],
)
def test_small_images_are_found_by_all_public_names(tmp_path, high, low, name, caplog):
    """BasicSR's set has the images before and after the crop to multiples of 12."""
    write(tmp_path / "original", "ab", side=31)
    write(tmp_path / high, "ab")
    write(tmp_path / low, map(name.format, "ab"), side=12)
    write(tmp_path / "LRbicx3", "ab", side=8)
    pairs = find_pairs(tmp_path, 2)
    assert [pair.high.parent for pair in pairs] == [tmp_path / high] * 2
    assert [pair.low for pair in pairs] == [
        tmp_path / low / f"{name.format(stem)}.png" for stem in "ab"
    ]
    assert not caplog.records
    data = BenchmarkDataModule(tmp_path, scale=2, sets=["set5"], published_counts=False)
    data.setup()
    assert data.dataset("val")[0, 1]["low"].shape == (3, 12, 12)


def write(folder, names, side=24):
    folder.mkdir(parents=True)
    for index, name in enumerate(names):
        Image.fromarray(noise(side, side, index)).save(folder / f"{name}.png")


def test_div2k_and_df2k(tmp_path):
    write(tmp_path / "DIV2K/DIV2K_train_HR", ["0001", "0002"])
    with pytest.raises(FileNotFoundError, match=r"DIV2K_valid_HR does not exist"):
        DIV2KDataModule(tmp_path).setup()
    write(tmp_path / "DIV2K/DIV2K_valid_HR", ["0801"])
    write(tmp_path / "DIV2K/DIV2K_valid_LR_bicubic/X4", ["0801x4"], side=6)
    write(tmp_path / "Flickr2K/Flickr2K_HR", ["000001", "000002", "000003"])
    data = DIV2KDataModule(tmp_path, patch_size=6)
    data.setup()
    assert data.sizes() == {"train": 2, "val": 1}
    both = DF2KDataModule(tmp_path, patch_size=6)
    both.setup()
    assert both.sizes() == {"train": 5, "val": 1}
    assert both.dataset("val").dataset.pairs[0].low.name == "0801x4.png"


def test_benchmarks_are_found_by_name(tmp_path):
    write(tmp_path / "Set5/HR", "abcde")
    write(tmp_path / "BSD100", "ab")
    alone = BenchmarkDataModule(tmp_path / "Set5", sets=["set5"])
    alone.setup()
    assert alone.sizes() == {"val": 5}
    with pytest.raises(ValueError, match=r"BSD100 has 2 images, but B100 has 100"):
        BenchmarkDataModule(tmp_path, sets=["set5", "b100"]).setup()
    both = BenchmarkDataModule(tmp_path, sets=["set5", "b100"], published_counts=False)
    both.setup()
    assert [name for name, _ in both.parts] == ["set5", "b100"]
    both.choose("b100")
    assert both.sizes() == {"val": 2}
    with pytest.raises(FileNotFoundError, match=r"folder is missing in .*: Urban100; add it"):
        BenchmarkDataModule(tmp_path, sets=["set5", "urban100"]).setup()


def test_the_sample_photographs_share_no_region(monkeypatch, tmp_path):
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path))
    data = SampleSuperResolution()
    data.setup()
    assert data.sizes() == {"train": 8, "val": 15}
    names = [Path(data.dataset("train").describe(index)).stem for index in range(8)]
    assert {"motorcycle_left", "motorcycle_right"} <= set(names)
    for name, (train, val) in parts().items():
        # Parts are columns of one photograph with a gap between them; no pixel is in both.
        assert val.size == 0 or train.shape[0] == val.shape[0], name
    assert PHOTO_COLUMNS["train"].stop < PHOTO_COLUMNS["val"].start
    stems = {Path(data.dataset("val").describe(index)).stem for index in range(15)}
    assert not any("motorcycle" in stem or "flower" in stem for stem in stems)
    sample = data.dataset("val")[0, 0]
    assert sample["high"].shape == (3, CROP, CROP)
    assert sample["low"].shape == (3, CROP // 4, CROP // 4)


def test_images_of_16_bits_keep_them(tmp_path):
    deep = np.random.default_rng(0).integers(0, 65536, (5, 7, 4), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", deep[..., :3], photometric="rgb")
    assert np.array_equal(read_pixels(tmp_path / "a.tif"), deep[..., :3])
    assert cv2.imwrite(str(tmp_path / "a.png"), deep[..., [2, 1, 0, 3]])
    assert np.array_equal(read_pixels(tmp_path / "a.png"), deep)
    Image.fromarray(deep[..., 0]).save(tmp_path / "grey.png")
    assert np.array_equal(read_pixels(tmp_path / "grey.png"), deep[..., :1])
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    refuses(r"cut.png is truncated or damaged", read_pixels, tmp_path / "cut.png")


def test_arrays_and_tensors():
    image = noise(4, 6)
    assert np.array_equal(array_pixels(torch.from_numpy(image).permute(2, 0, 1)), image)
    assert np.array_equal(array_pixels(image / 255), image.astype(np.uint16) * 257)
    assert array_pixels(image[..., 0]).shape == (4, 6, 1)
    for wrong in (image.astype(np.int64), image[:0], image / 2.0, image[None]):
        refuses(r"ndarray .* is not an image; an image is a path", collect, [wrong])
