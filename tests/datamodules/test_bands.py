"""Images of bands: files of any depth, statistics, transforms, and training to prediction."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from lightning import Trainer
from PIL import Image
from torchvision.io import encode_png

import tasks
from backbones import create_backbone
from datamodules import ClassFoldersDataModule
from datamodules.dense.segmentation_folder import SegmentationFolderDataModule
from datamodules.files.bands import Statistics, measure, parse_bands, read_bands, read_shape
from datamodules.images.band_transforms import Jitter, eval_transform, train_transform
from datamodules.images.transforms import LightAugmentation, PaperAugmentation
from heads.linear import LinearClassifier
from tasks import ClassificationTask
from tests.datamodules import loading
from tests.errors import refuses
from tests.runs import QUIET, composed

HEIGHT, WIDTH = 20, 26
PLAIN = PaperAugmentation(auto_augment=None)


def values(count=5, dtype=np.uint16, seed=0, size=(HEIGHT, WIDTH)):
    drawn = np.random.default_rng(seed).integers(0, 60_000, (*size, count))
    return (drawn / 7).astype(dtype) if np.issubdtype(dtype, np.floating) else drawn.astype(dtype)


def first(pixels):
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def write_tiff(path, pixels, **options):
    tifffile.imwrite(path, pixels, photometric="minisblack", **options)


def write_png(path, pixels):
    """Write 16 bits, which neither Pillow nor torchvision writes in colours, by its own chunks."""
    import struct
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(
            ">I", zlib.crc32(kind + content)
        )  # fmt: skip

    height, width, count = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[count], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def write_reduced(path, pixels):
    """Write pages and a smaller copy of the first one, as a cloud-optimised GeoTIFF has."""
    with tifffile.TiffWriter(path) as file:
        file.write(first(pixels), photometric="minisblack")
        file.write(pixels[::2, ::2, 0], photometric="minisblack", subfiletype=1)


FORMATS = {
    "tiff_pixels": ("a.tif", write_tiff, 5, np.uint16, {"planarconfig": "contig"}),
    "tiff_planes": ("a.TIF", lambda p, x, **o: write_tiff(p, first(x), **o), 5, np.uint16,
                    {"planarconfig": "separate"}),
    "tiff_pages": ("a.tiff", lambda p, x, **o: write_tiff(p, first(x), **o), 5, np.float32,
                   {"compression": "zlib"}),
    "tiff_tiles": ("a.tif", lambda p, x, **o: write_tiff(p, first(x), **o), 4, np.int16,
                   {"tile": (16, 16), "compression": "deflate", "predictor": 2}),
    "tiff_reduced": ("a.tif", write_reduced, 5, np.uint16, {}),
    "tiff_one": ("a.tif", lambda p, x: write_tiff(p, x[..., 0]), 1, np.uint8, {}),
    "npy_last": ("a.npy", np.save, 7, np.float64, {}),
    "npy_first": ("a.npy", lambda p, x: np.save(p, first(x)), 7, np.uint16, {}),
    "npy_one": ("a.npy", lambda p, x: np.save(p, x[..., 0]), 1, np.int32, {}),
    "png_deep": ("a.png", write_png, 3, np.uint16, {}),
    "png_deep_alpha": ("a.png", write_png, 4, np.uint16, {}),
    "png_deep_grey": ("a.png", write_png, 1, np.uint16, {}),
    "png_grey_alpha": ("a.png", lambda p, x: Image.fromarray(x).save(p), 2, np.uint8, {}),
    "png": ("a.png", lambda p, x: p.write_bytes(bytes(encode_png(torch.from_numpy(first(x))))), 3,
            np.uint8, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_those_of_the_file(form, tmp_path):
    name, write, count, dtype, options = FORMATS[form]
    pixels = values(count, dtype)
    write(tmp_path / name, pixels, **options)
    for bands in (parse_bands(count), parse_bands(list(range(count)))):
        assert read_shape(tmp_path / name, bands) == (HEIGHT, WIDTH)
        read = read_bands(tmp_path / name, bands)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, pixels.astype(np.float32))
    chosen = [count - 1, 0][: min(count, 2)]
    some = read_bands(tmp_path / name, parse_bands(chosen))
    np.testing.assert_array_equal(some, pixels[..., chosen].astype(np.float32))


def cut(write, name, share=0.5):
    def made(folder):
        write(folder / name, values())
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])
        return name

    return made


def other(write, name, *given):
    def made(folder):
        write(folder / name, *given)
        return name

    return made


def of_two_sizes(path):
    with tifffile.TiffWriter(path) as file:
        for side in (8, 9):
            file.write(np.zeros((side, side), np.uint16), photometric="minisblack")


def write_12_bits(path):
    Image.new("I;16", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[content.find(b"\xff\x4f\xff\x51") + 42] = 11
    path.write_bytes(content)


NAN = values(5, np.float32)
NAN[3, 4, 2] = np.nan
BROKEN = {
    "count": (
        other(np.save, "a.npy", values(4)),
        "has 4 bands, .* but data.bands=5; pass data.bands",
    ),
    "nan": (other(np.save, "a.npy", NAN), "NaN or infinite"),
    "complex": (
        other(np.save, "a.npy", values().astype(np.complex64)),
        "values that are complex, NaN or infinite",
    ),
    "axes": (other(np.save, "a.npy", values()[None]), r"not numbers \(H, W\), \(H, W, ban"),
    "text": (other(np.save, "a.npy", np.array([["a"]])), "not numbers"),
    "objects": (other(np.save, "a.npy", np.array([{}])), "damaged"),
    "empty": (lambda folder: (folder / "a.npy").touch() or "a.npy", "damaged"),
    "no_tiff": (other(lambda p: p.write_bytes(b"II*\0 no more"), "a.tif"), "damaged"),
    "cut_npy": (cut(np.save, "a.npy"), "damaged"),
    "cut_tiff": (cut(partial(write_tiff, planarconfig="contig"), "a.tif"), "damaged"),
    "cut_zlib": (
        cut(partial(write_tiff, planarconfig="contig", compression="zlib"), "a.tif"),
        "damaged",
    ),
    "cut_png": (cut(lambda p, x: write_png(p, x[..., :3]), "a.png"), "damaged"),
    "sizes": (other(of_two_sizes, "a.tif"), "pages are of 2 sizes"),
    "both_ends": (other(np.save, "a.npy", np.zeros((5, 64, 5))), "fewer bands than rows"),
    "pgm": (other(Path.write_bytes, "a.pgm", b"P5\n# c\n2 1\n4095\n\1\2\3\4"), "up to 4,095, "),
    "ppm": (other(Path.write_bytes, "a.ppm", b"P6 1 1 65535\n" + bytes(6)), "up to 65,535, which"),
    "jp2": (other(write_12_bits, "a.jp2"), "up to 4,095, which Pillow scales"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case, tmp_path):
    make, message = BROKEN[case]
    path = tmp_path / make(tmp_path)
    text = refuses(message, read_bands, path, parse_bands(3 if case == "cut_png" else 5))
    assert str(path) in text


def test_a_missing_band_is_named(tmp_path):
    np.save(tmp_path / "a.npy", values(4))
    refuses("numbered from 0", read_bands, tmp_path / "a.npy", parse_bands([0, 4]))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_bands(tmp_path / "b.tif", parse_bands(4))


@pytest.mark.parametrize("given", [0, 13, True, "all", [], [0, 0], [-1], [0.5]])
def test_bands_are_from_1_to_12(given):
    refuses("data.bands", parse_bands, given)


def test_statistics_are_those_of_all_pixels(tmp_path):
    images = [values(3, seed=seed, size=(HEIGHT + seed, WIDTH)) for seed in range(3)]
    for number, pixels in enumerate(images):
        np.save(tmp_path / f"{number}.npy", pixels)
    found = measure([str(tmp_path / f"{n}.npy") for n in range(3)], parse_bands([2, 0]))
    pixels = np.concatenate([one.reshape(-1, 3) for one in images])[:, [2, 0]].astype(np.float64)
    np.testing.assert_allclose(found.mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, pixels.std(0), rtol=1e-9)
    np.save(tmp_path / "0.npy", (values() * 0 + 0.1).astype(np.float32))
    refuses(
        "band 0, 1 has one value",
        measure,
        [str(tmp_path / "0.npy")],
        parse_bands(5).__class__((0, 1)),
    )


def class_folders(root, count=4, bands=5):
    for label in range(2):
        folder = root / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = values(bands, seed=10 * label + number, size=(40, 48))
            pixels[..., -1] //= 1 + 3 * label
            np.save(folder / f"{number}.npy", pixels)
            if number % 2:
                (folder / f"{number}.npy").unlink()
                write_tiff(folder / f"{number}.tif", first(pixels))
    return root


module, ready, rejected, _ = loading.bound(
    ClassFoldersDataModule, image_size=32, batch_size=4, num_workers=0, augmentation=PLAIN,
    val_share=0.25,
)  # fmt: skip


def test_batches_are_normalised_by_the_statistics_of_training(tmp_path):
    data = ready(class_folders(tmp_path), bands=5, augmentation=LightAugmentation(), image_size=40)
    (batch,) = data.val_dataloader()
    assert batch["image"].shape == (2, 5, 40, 40)
    training = [data.dataset("train").describe(i) for i in range(6)]
    pixels = np.concatenate([read_bands(one, data.bands).reshape(-1, 5) for one in training])
    np.testing.assert_allclose(data.statistics.mean, pixels.mean(0, dtype=np.float64), rtol=1e-6)
    assert data.made_by["band_mean"] == list(data.normalisation[0])
    path = data.dataset("val").describe(0)
    given = torch.from_numpy(first(read_bands(path, data.bands)))
    mean, std = (torch.tensor(part)[:, None, None] for part in data.normalisation)
    expected = F.interpolate(
        given[None], (40, 40), mode="bicubic", antialias=True, align_corners=False
    )[0]
    torch.testing.assert_close(batch["image"][0], ((expected - mean) / std).float())
    typed = ready(tmp_path, bands=[1], band_mean=[5.0], band_std=[2.0])
    assert typed.normalisation == ((5.0,), (2.0,))


REFUSED = {
    "policy": ({"bands": 5, "augmentation": PaperAugmentation()}, "auto_augment=null"),
    "statistics": (
        {"band_mean": [1.0], "band_std": [1.0]},
        r"one number per band of data.bands \(0\)",
    ),
    "lengths": (
        {"bands": 5, "band_mean": [1.0], "band_std": [1.0]},
        r"one number per band of data.bands \(5\)",
    ),
    "deviation": ({"bands": 1, "band_mean": [1.0], "band_std": [0]}, "deviations above 0"),
    "labels": (
        {"bands": 5, "token_labels": "maps"},
        "data.token_labels must be left out with data.bands",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_for_rgb_are_refused(case, tmp_path):
    options, message = REFUSED[case]
    rejected(tmp_path, message, **options)


STATISTICS = Statistics((0.0,) * 5, (1.0,) * 5)
EVERY = {
    "paper": PaperAugmentation(auto_augment=None, train_interpolation="random", random_erasing=1.0),
    "light": LightAugmentation(flip=0.5, random_erasing=1.0),
}


def seeded(transform, image):
    random.seed(0)
    torch.manual_seed(0)
    return transform(image)


@pytest.mark.parametrize("kind", EVERY)
def test_transforms_treat_all_bands_alike(kind):
    """Equal bands stay equal, apart from erased noise; draws depend on the seeds alone."""
    made = EVERY[kind]
    band = values(1, size=(33, 47)).astype(np.float32)
    image = np.repeat(band, 5, axis=2)
    for transform in (
        train_transform(type(made)(**{**vars(made), "random_erasing": 0.0}), 24, STATISTICS),
        eval_transform(made, 24, STATISTICS),
    ):
        made_of = [seeded(transform, image) for _ in range(2)]
        assert made_of[0].shape == (5, 24, 24)
        assert made_of[0].dtype == torch.float32
        assert torch.equal(*made_of)
        assert torch.equal(made_of[0], made_of[0][:1].expand(5, -1, -1))
    erased = train_transform(made, 24, STATISTICS)(image)
    assert erased.shape == (5, 24, 24)
    assert eval_transform(made, 24, STATISTICS)(values(5, np.float32, size=(9_000, 3))).shape == (
        5,
        24,
        24,
    )


def test_jitter_changes_brightness_and_contrast():
    torch.manual_seed(0)
    brightness, contrast = torch.empty(2).uniform_(0.6, 1.4).tolist()
    torch.manual_seed(0)
    bands = torch.rand(3, 4, 5, dtype=torch.float64)
    torch.manual_seed(0)
    changed = Jitter(0.4)(bands)
    mean = brightness * bands.mean((1, 2), keepdim=True)
    torch.testing.assert_close(changed, mean + contrast * (brightness * bands - mean))


def test_a_classifier_of_bands_is_trained_saved_and_predicts(tmp_path):
    data = module(class_folders(tmp_path / "data"), bands=5, image_size=64)
    data.setup()
    assert data.backbone_arguments == {"in_chans": 5}
    backbone = create_backbone("timm_afbo", model="test_vit", img_size=64, in_chans=5)
    task = ClassificationTask(
        LinearClassifier(backbone, 2), data.class_names, optimizer={"lr": 1e-3}
    )
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    loaded = tasks.load(tmp_path / "task.ckpt")
    assert loaded.data.normalisation == data.normalisation
    path = data.dataset("val").describe(0)
    array = read_bands(path, data.bands)
    rows = loaded.predict([path, array, torch.from_numpy(first(array))])
    assert rows[0]["probabilities"] == rows[1]["probabilities"] == rows[2]["probabilities"]
    (batch,) = data.val_dataloader()
    with torch.no_grad():
        expected = task.eval().model.predict(batch)[0].softmax(-1).max().item()
    assert rows[0]["probabilities"][0] == pytest.approx(expected, abs=1e-5)
    refuses("an image of bands is a path, an array", loaded.predict, Image.new("RGB", (8, 8)))
    assert task.preview(data.preview_batch(2), data)[0].mode == "RGB"


def segmentation_folder(root, bands=3):
    (root / "class_names.txt").parent.mkdir(parents=True)
    (root / "class_names.txt").write_text("ground\nfield\n")
    for split, count in (("train", 2), ("val", 1)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            np.save(
                root / "images" / split / f"{number}.npy", values(bands, seed=number, size=(32, 48))
            )
            mask = Image.new("L", (48, 32))
            mask.paste(1, (0, 0, 24, 32))
            mask.save(root / "masks" / split / f"{number}.png")
    return root


@pytest.mark.parametrize("bands", [3, 4])
def test_a_segmentor_sees_bands_in_their_order(bands, tmp_path):
    data = SegmentationFolderDataModule(
        segmentation_folder(tmp_path / "data", bands), bands=bands, photometric=False,
        scale=(48, 32), crop_size=32, batch_size=1, num_workers=0,
    )  # fmt: skip
    data.setup()
    data.check_files()
    (batch,) = data.val_dataloader()
    raw = values(bands, seed=0, size=(32, 48)).astype(np.float32)
    np.testing.assert_array_equal(batch["inputs"][0].numpy(), first(raw))
    from heads.toolkits.segmentors import build_segmentor

    backbone = create_backbone("resnet18", in_chans=bands, dense=True)
    model = build_segmentor(backbone, channels=64, **data.head_arguments)
    seen = model._prepare(batch, training=False)["inputs"][0].numpy()
    mean, std = (np.array(part)[:, None, None] for part in data.statistics.__dict__.values())
    expected = (first(raw) - mean) / std
    np.testing.assert_allclose(seen[:, :, :48], expected, rtol=1e-5, atol=1e-5)
    assert not seen[:, :, 48:].any()  # padding
    (cropped,) = list(data.train_dataloader())[:1]
    assert cropped["inputs"][0].shape == (bands, 32, 32)
    refuses(
        "data.photometric must be false with data.bands",
        SegmentationFolderDataModule,
        tmp_path,
        bands=3,
    )


def test_a_command_sets_the_channels_of_the_network(tmp_path):
    words = ("task=classification", "backbone=deit_t", "data=folder", f"data.root={tmp_path}")
    assert composed(*words, "data.bands=[0,3]").backbone["in_chans"] == 2
    assert composed(*words, "data.bands=4", "backbone.in_chans=4").backbone["in_chans"] == 4
    assert composed(*words).backbone["in_chans"] == 3
    refuses("images have 4 channels", composed, *words, "data.bands=4", "backbone.in_chans=5")
    refuses("images have 3 channels", composed, *words, "backbone.in_chans=5")
