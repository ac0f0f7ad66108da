"""Masks in all file formats: labels are the stored numbers or colours."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("mmseg")

from datamodules import SegmentationFolderDataModule
from datamodules.files.decoding import load_rgb
from datamodules.files.headers import read_header
from datamodules.files.mask_pixels import read_pixels
from tasks.engine.drawing import open_upright
from tasks.segmentation.segment_drawing import label_map
from tests.errors import refuses
from tests.segmentation_sets import SIZE, folder, logged_lines, ready, rejected, truths

HEIGHT, WIDTH = 5, 13  # rows of few bits end within a byte
GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
WHOLE = ((0, 0, 1, 1),)
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2),
         (1, 0, 2, 1))  # fmt: skip
GAMMA = (b"gAMA", struct.pack(">I", 100_000))
BITS = (b"sBIT", b"\x01")


def packed(row, depth):
    """Return samples of a row as bytes, highest bits first."""
    bits = "".join(f"{int(value):0{depth}b}" for value in np.ravel(row))
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def png(path, values, depth, kind=GREY, *, interlaced=False, chunks=()):
    """Write a PNG by its specification; Pillow's writer lacks grey of 2 and 4 bits."""
    values = np.asarray(values)
    lines = [
        b"\0" + packed(row, depth)
        for top, left, down, right in (ADAM7 if interlaced else WHOLE)
        for row in values[top::down, left::right]
        if row.size
    ]
    size = values.shape[1::-1]
    colours = np.random.default_rng(1).integers(0, 256, 3 * 2**depth, np.uint8).tobytes()
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, interlaced)),
        *[part for part in chunks if part[0] != b"tRNS"],
        *([(b"PLTE", colours)] if kind == PALETTE else []),
        *[part for part in chunks if part[0] == b"tRNS"],
        (b"IDAT", zlib.compress(b"".join(lines))),
        (b"IEND", b""),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in parts
        )
    )


def tiff(path, values, bits, order="<", photometric=1, more=()):
    """Write an uncompressed TIFF by its specification."""
    values = np.asarray(values)
    height, width = values.shape
    if bits <= 8:
        data = b"".join(packed(row, bits) for row in values)
    else:
        data = values.astype(f"{order}u{bits // 8}").tobytes()
    colours = 3 * 2**bits * 2 * (photometric == 3)
    tags = [
        (256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, bits), (259, 3, 1, 1),
        (262, 3, 1, photometric), (273, 4, 1, 8 + colours), (277, 3, 1, 1), (278, 4, 1, height),
        (279, 4, 1, len(data)), *more, *([(320, 3, 3 * 2**bits, 8)] if colours else []),
    ]  # fmt: skip
    directory = struct.pack(f"{order}H", len(tags))
    for tag, kind, count, value in sorted(tags):
        form, numbers = ("HH", (value, 0)) if kind == 3 and count == 1 else ("I", (value,))
        directory += struct.pack(f"{order}HHI{form}", tag, kind, count, *numbers)
    start = struct.pack(f"{order}I", 8 + colours + len(data))
    head = (b"II*\0" if order == "<" else b"MM\0*") + start
    path.write_bytes(head + bytes(colours) + data + directory + bytes(4))


def labels(bits, *channels):
    top = 2 ** min(bits, 8)
    return np.random.default_rng(0).integers(0, top, (HEIGHT, WIDTH, *channels))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("chunks", [(), (GAMMA, BITS, (b"tRNS", b"\0\1"))])
@pytest.mark.parametrize(("depth", "kind"), [*[(d, GREY) for d in (1, 2, 4, 8, 16)],
                                             *[(d, PALETTE) for d in (1, 2, 4, 8)]])  # fmt: skip
def test_values_of_a_png_are_its_labels(tmp_path, depth, kind, chunks, interlaced):
    values = labels(depth)
    png(tmp_path / "m.png", values, depth, kind, interlaced=interlaced, chunks=chunks)
    assert np.array_equal(read_pixels(tmp_path / "m.png"), values)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("bits", "photometric"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1),
                                                   (1, 3), (4, 3), (8, 3)])  # fmt: skip
def test_values_of_a_tiff_are_its_labels(tmp_path, bits, photometric, order):
    tiff(tmp_path / "m.tif", labels(bits), bits, order, photometric)
    assert np.array_equal(read_pixels(tmp_path / "m.tif"), labels(bits))


@pytest.mark.parametrize(("channels", "kind"), [((1,), GREY_ALPHA), ((3,), RGB_ALPHA)])
def test_opaque_alpha_is_dropped(tmp_path, channels, kind):
    values = labels(8, *channels)
    opaque = np.full((HEIGHT, WIDTH, 1), 255)
    png(tmp_path / "m.png", np.concatenate([values, opaque], -1), 8, kind)
    assert np.array_equal(read_pixels(tmp_path / "m.png"), values.squeeze())


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_values_of_a_bmp_are_its_labels(tmp_path, mode):
    values = labels(1 if mode == "1" else 8)
    image = Image.fromarray(values.astype(np.uint8))
    if mode == "P":
        image.putpalette(np.random.default_rng(2).integers(0, 256, 768).tolist())
    image = image.point(lambda value: 255 * value).convert("1") if mode == "1" else image
    image.save(tmp_path / "m.bmp")
    assert np.array_equal(read_pixels(tmp_path / "m.bmp"), values)


def two_pages(path):
    first = Image.fromarray(labels(8).astype(np.uint8))
    first.save(path, save_all=True, append_images=[first])


def palette_of_four_bits(path):
    rows = b"".join(packed(row, 4).ljust(8, b"\0") for row in labels(4)[::-1])
    colours = b"".join(bytes([i, i, i, 0]) for i in range(16))
    info = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 4, 0, len(rows), 0, 0, 16, 0)
    start = 14 + len(info) + len(colours)
    head = b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start)
    path.write_bytes(head + info + colours + rows)


SIGNED = ((339, 3, 1, 2),)
UNREADABLE = {
    "is a JPEG file": lambda p: Image.new("L", (9, 9)).save(p, format="JPEG"),
    "is a TIFF in which 0 is white": lambda p: tiff(p, labels(8), 8, photometric=0),
    "is a TIFF of signed bytes": lambda p: tiff(p, labels(8), 8, more=SIGNED),
    "is a BMP with a grey palette": palette_of_four_bits,
    "has 2 pages": two_pages,
    "has pixels of mode F": lambda p: Image.fromarray(np.ones((9, 9), np.float32)).save(p),
    r"has 16 bits per channel .* save labels as": lambda p: png(p, labels(8, 3), 16, RGB),
    r"has 16 bits per channel and": lambda p: png(p, labels(8, 2), 16, GREY_ALPHA),
    r"has \d+ transparent pixels": lambda p: png(p, labels(8, 2), 8, GREY_ALPHA),
}


@pytest.mark.parametrize("message", UNREADABLE)
def test_ambiguous_masks_are_rejected(tmp_path, message):
    path = tmp_path / ("m.tif" if {"pages", "F"} & {*message.split()} else "m.png")
    UNREADABLE[message](path)
    refuses(rf"{path.name} {message}", read_pixels, path)


def masks(root, write, suffix="png"):
    """Replace the masks of a folder dataset, one after the other."""
    for number, path in enumerate(sorted(root.glob("masks/*/*.png"))):
        path.unlink()
        write(path.with_suffix(f".{suffix}"), number)


def check_all(data, expected):
    found = list(truths(data).values())
    assert found
    assert all(np.array_equal(one, expected) for one in found)


@pytest.mark.parametrize("order", ["<", ">"])
def test_labels_beyond_8_bits_are_named(tmp_path, order):
    masks(folder(tmp_path), lambda path, _: tiff(path, np.full(SIZE, 2), 16, order), "tif")
    data = ready(SegmentationFolderDataModule, tmp_path)
    assert {int(found.max()) for found in truths(data).values()} == {2}
    tiff(tmp_path / "masks/val/1.tif", np.full(SIZE, 256), 16, order)  # its low byte is a label
    refuses(r"1\.tif has labels \[256\], but 3 classes are lab", data.check_files)
    png(tmp_path / "masks/val/1.png", np.full(SIZE, 65535), 16)
    (tmp_path / "masks/val/1.tif").unlink()
    with pytest.raises(ValueError, match=r"1\.png has labels \[65535\]"):
        ready(SegmentationFolderDataModule, tmp_path).check_files()


@pytest.mark.parametrize("channels", [(), (3,)])
def test_two_classes_of_black_and_white_masks(tmp_path, channels):
    root = folder(tmp_path)
    (root / "class_names.txt").write_text("road\nfield\n")
    halves = np.zeros((*SIZE, *channels), int)
    halves[20:] = 255
    masks(root, lambda path, number: png(path, halves * (number == 1), 8, RGB if channels else 0))
    rejected(SegmentationFolderDataModule, root, r"only 0 and 255, .*pass data\.values=\[0,255\]")
    data = ready(SegmentationFolderDataModule, root, values=[0, 255])
    data.check_files()
    found = {path[-5]: labels for path, labels in truths(data).items()}
    assert [np.unique(found[number]).tolist() for number in "01"] == [[0], [0]]
    ready(SegmentationFolderDataModule, root, values=[0, 1])
    png(root / "masks/train/0.png", np.ones(SIZE), 1)
    ready(SegmentationFolderDataModule, root)


COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]])


def coloured(root, palette=COLOURS, **options):
    """Write masks with colours for labels 0, 1, 2 and white for ignored pixels."""
    truth = np.random.default_rng(3).choice([0, 0, 0, 0, 1, 1, 1, 2, 2, 3], SIZE)
    masks(folder(root), lambda path, _: png(path, palette[truth], 8, RGB))
    given = {"colors": palette[:3].tolist(), "ignored_colors": palette[3:].tolist()}
    return np.where(truth == 3, 255, truth), {**given, **options}


def test_colours_are_labels(tmp_path):
    truth, options = coloured(tmp_path)
    data = ready(SegmentationFolderDataModule, tmp_path, **options)
    data.check_files()
    check_all(data, truth)
    assert data.category_ids == (0, 1, 2)
    assert data.metainfo["palette"] == COLOURS[:3].tolist()


def test_predicted_label_maps_are_read_back(tmp_path):
    truth, options = coloured(tmp_path)
    truth[truth == 255] = 0
    data = ready(SegmentationFolderDataModule, tmp_path, **options)
    written = label_map(truth.astype(np.uint8), data.category_ids, data.metainfo["palette"])
    for path in sorted(tmp_path.glob("masks/*/*.png")):
        written.save(path)
    for again in (options, {}):  # by colours and by numbers
        check_all(ready(SegmentationFolderDataModule, tmp_path, **again), truth)


def test_masks_in_colours_name_the_option(tmp_path):
    _, options = coloured(tmp_path)
    said = rejected(SegmentationFolderDataModule, tmp_path, "is in colours")
    typed = "data.colors=[[0,0,0],[128,0,0],[0,128,0]] data.ignored_colors=[[255,255,255]]"
    assert f"pass {typed} in the order of the 3 classes" in said
    for values, depth, kind, message in (
        (np.full((*SIZE, 3), (9, 8, 7)), 8, RGB, r"has 1 colour that .* lack: \[\[9,8,7\]\]$"),
        (np.zeros(SIZE), 16, GREY, "has grey values of uint16, but data.colors"),
    ):
        png(tmp_path / "masks/val/1.png", values, depth, kind)
        with pytest.raises(ValueError, match=rf"1\.png {message}"):
            ready(SegmentationFolderDataModule, tmp_path, **options).check_files()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colors": [[0, 0, 0]]}, r"data\.colors must be one colour for each of 3 classes \(soil"),
        ({"colors": [[0, 0, 0]] * 3}, "all must be different colours"),
        ({"colors": [[0, 0]]}, r"must be red, green and blue from 0 to 255, .*, got \(0, 0\)"),
        ({"colors": [[0, 0, 1], [0, 0, 300]]}, r"data\.colors\[1\] must be red, .*\(0, 0, 300\)"),
        ({"colors": [[0, 0, 0.5]]}, r"data\.colors\[0\]\[2\] must be an integer, got 0\.5"),
        ({"colors": ["#000"]}, r'data\.colors\[0\] must be red, .*, got "#000"'),
        ({"ignored_colors": [[0, 0, 0]]}, r"data\.ignored_colors must be beside data\.colors"),
        ({"values": [1, 2, 3]}, r"pass data\.colors and ignored_colors alone"),
    ],
)
def test_wrong_colours_are_rejected(tmp_path, options, message):
    _, given = coloured(tmp_path)
    given = given if "values" in options else {}
    rejected(SegmentationFolderDataModule, tmp_path, message, **{**given, **options})


def save_rotated(pixels, path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels.astype(np.uint8)).save(path, exif=exif)


def make_rotated(root, orientation, *, size=SIZE, suffix="png"):
    """Write a dataset with an orientation in its first validation image and visible labels."""
    folder(root)
    shown = np.zeros((*size, 3))
    shown[: size[0] // 4, : size[1] // 3] = 200
    (root / "images/val/0.tif").unlink()
    turns = {3: 2, 6: 1, 8: -1}[orientation]
    save_rotated(np.rot90(shown, turns), root / f"images/val/0.{suffix}", orientation)
    png(root / "masks/val/0.png", shown[..., 0] // 200, 2)
    return shown


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
@pytest.mark.parametrize(("orientation", "size"), [(3, SIZE), (6, SIZE), (8, SIZE), (6, (40, 40))])
def test_rotated_images_and_their_masks(tmp_path, caplog, orientation, size, suffix):
    shown = make_rotated(tmp_path, orientation, size=size, suffix=suffix)
    image = tmp_path / f"images/val/0.{suffix}"
    assert read_header(image, upright=True)[:2] == shown.shape[1::-1]
    assert np.abs(np.asarray(load_rgb(image, upright=True)) - shown).max() < 30
    assert np.abs(np.asarray(open_upright(image).convert("RGB")) - shown).max() < 30
    data = ready(SegmentationFolderDataModule, tmp_path, scale=size[::-1])
    (first, *_) = data.val_dataloader()
    pixels, sample = first["inputs"][0], first["data_samples"][0]
    assert ((pixels[0] > 100) == (sample.gt_sem_seg.data[0] == 1)).all()
    (line, *_) = [line for line in logged_lines(data, caplog) if "EXIF" in line]
    assert line.startswith(
        f"1 of 4 images are rotated by their EXIF data, but their masks are stored upright "
        f"({image})"
    )
