"""Images of 1 to 12 bands of any depth: TIFF with bands or pages, npy, PNG of 16 bits, and others.

Values stay as stored: neither scaled nor rotated. Each band is normalised by its own statistics.
Axes: H rows, W columns, C bands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.io import ImageReadMode, decode_png

from datamodules.files.console import log
from datamodules.files.decoding import MAX_PIXELS, decode, image_errors, plain_file
from datamodules.files.folders import IMAGE_SUFFIXES, file_suffix, first_few
from datamodules.files.unlabelled import collect_inputs
from datamodules.files.values import check_option, integer_list

MOST = 12
BAND_FORMS = (
    "an image of bands is a path, an array (H, W, C) or a tensor (C, H, W), with values as in the "
    "files"
)
ARRAY, TIFF = ".npy", (".tif", ".tiff")
BAND_SUFFIXES = IMAGE_SUFFIXES | {ARRAY}
PNG_START, PNG_DEPTH_AT = b"\x89PNG\r\n\x1a\n", 24  # first bytes, and the place of the depth
# The largest value in the header of a PGM or PPM; the start of a JPEG 2000 stream, and from there
# the place of the depth less one.
PNM_GAP = rb"(?:\s|#[^\n]*\n)+"
PNM_LARGEST = re.compile(rb"P[2356]" + rb"\d+".join([PNM_GAP] * 3) + rb"(\d+)")
JP2_START, JP2_DEPTH_AT = b"\xff\x4f\xff\x51", 42
MEASURED = 2_000  # training images, evenly spaced, that statistics are computed from
THREADS = 8
MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA"}  # as Pillow converts them
Pixels = NDArray[Any]


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation per band, in the units of the files."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Bands:
    """The bands of each file that a network sees.

    Attributes:
        numbers: Their numbers in the file, from 0 on.
        total: Bands that each file must have; None for any number.
    """

    numbers: tuple[int, ...]
    total: int | None = None

    def select(self, pixels: Pixels, name: str) -> NDArray[np.float32]:
        """Return the chosen bands (H, W, C) as float32.

        Raises:
            ValueError: A band is missing, or a value is complex, infinite or NaN.
        """
        self.check(pixels.shape[2], name)
        is_whole = self.numbers == tuple(range(pixels.shape[2]))
        values = pixels if is_whole else pixels[:, :, list(self.numbers)]
        is_complex = np.issubdtype(pixels.dtype, np.complexfloating)
        values = values if is_complex else values.astype(np.float32)
        if is_complex or not np.isfinite(values).all():
            raise ValueError(
                f"{name} has values that are complex, NaN or infinite; save amplitude and phase as "
                "two bands, and replace others by numbers, such as the band's mean"
            )
        return values

    def check(self, count: int, name: str) -> None:
        """Check the number of bands of a file.

        Raises:
            ValueError: It has others than ``data.bands`` states.
        """
        if self.total not in (None, count) or max(self.numbers) >= count:
            option = list(self.numbers) if self.total is None else self.total
            raise ValueError(
                f"{name} has {count} bands, numbered from 0, but data.bands={option}; pass "
                f"data.bands={count}, or the numbers of bands that every file has, such as "
                "data.bands=[0,1]"
            )


def parse_bands(value: Any) -> Bands | None:
    """Return the bands of the option ``data.bands``; None for 8-bit RGB.

    Raises:
        ValueError: It is neither a number from 1 to 12 nor a list of different numbers.
    """
    if value is None:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    numbers = tuple(range(value)) if is_number else ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = integer_list("data.bands", value)
    valid = 1 <= len(numbers) <= MOST and min(numbers) >= 0 and len(set(numbers)) == len(numbers)
    rule = f"the number of bands, from 1 to {MOST}, or a list of different ones, such as [0,1,2,7]"
    check_option("bands", value, valid, rule)
    return Bands(numbers, value if is_number else None)


def parse_statistics(bands: Bands | None, mean: Any, std: Any) -> Statistics | None:
    """Return the statistics of the options ``data.band_mean`` and ``data.band_std``.

    Raises:
        ValueError: One of them is missing or has another length, or a deviation is not above 0.
    """
    if mean is None and std is None:
        return None
    count = 0 if bands is None else len(bands.numbers)
    measurements = [tuple(float(value) for value in part or ()) for part in (mean, std)]
    valid = {len(part) for part in measurements} == {count} and min(measurements[1], default=0) > 0
    rule = f"one number per band of data.bands ({count}) each, with deviations above 0"
    check_option("band_mean and data.band_std", [mean, std], valid, rule)
    return Statistics(*measurements)


def read_bands(path: str | Path, bands: Bands) -> NDArray[np.float32]:
    """Return the chosen bands of a file: (H, W, C) of float32.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is broken or lacks a band, or a value is not finite.
    """
    return bands.select(_load(Path(path), bands), str(path))


def read_shape(path: str | Path, bands: Bands) -> tuple[int, int]:
    """Check a file's header, and return its height and width.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is broken or lacks a band.
    """
    path = Path(path)
    if file_suffix(path.name) in TIFF:
        with image_errors(path), tifffile.TiffFile(plain_file(path)) as file:
            pages = _pages(file)
            height, width = pages[0].imagelength, pages[0].imagewidth
            count = sum(page.samplesperpixel for page in pages)
    else:
        height, width, count = _load(path, bands).shape
    bands.check(count, str(path))
    return height, width


def measure(paths: Sequence[str], bands: Bands) -> Statistics:
    """Return the statistics of training images; log them and the number of images.

    Raises:
        ValueError: A file is broken, or a band is constant.
    """
    spaced = paths[:: -(-len(paths) // MEASURED)]

    def sums(path: str) -> NDArray[np.float64]:
        values = read_bands(path, bands).reshape(-1, len(bands.numbers)).astype(np.float64)
        count = np.full(values.shape[1], len(values))
        return np.stack([count, values.sum(0), (values**2).sum(0), values.min(0), values.max(0)])

    with ThreadPoolExecutor(THREADS) as pool:
        measurements = np.stack(list(pool.map(sums, spaced)))
    count, total, squares = measurements[:, :3].sum(0)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    varies = measurements[:, 3].min(0) < measurements[:, 4].max(
        0
    )  # rounding leaves a constant some deviation
    constant = [number for number, some in zip(bands.numbers, varies, strict=True) if not some]
    if constant:
        raise ValueError(
            f"band {first_few(constant)} has one value in all training images; leave it out by "
            "data.bands=[...]"
        )
    texts = [", ".join(f"{value:.4g}" for value in part) for part in (mean, std)]
    log(
        f"Statistics of {len(spaced):,} of {len(paths):,} training images: "
        f"data.band_mean=[{texts[0]}] data.band_std=[{texts[1]}]"
    )
    return Statistics(tuple(mean.tolist()), tuple(std.tolist()))


class UnlabelledBands:
    """Dataset of images of bands without labels.

    Args:
        images: Files, and arrays (H, W, C).
        bands: The bands of each.
        prepare: Function from an image, its name and its index to a sample.
    """

    def __init__(
        self,
        images: Sequence[Path | Pixels],
        bands: Bands,
        prepare: Callable[[Any, str, int], Any],
    ) -> None:
        self.images, self.bands, self.prepare = tuple(images), bands, prepare

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """Return an image's path; for an array, its number."""
        image = self.images[index]
        return str(image) if isinstance(image, Path) else f"image {index}"

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample of an image."""
        image, name = self.images[index], self.name(index)
        if isinstance(image, Path):
            return self.prepare(read_bands(image, self.bands), name, index)
        return self.prepare(self.bands.select(image, name), name, index)


def collect_bands(inputs: Any) -> list[Path | Pixels]:
    """Return one or several images as paths and arrays (H, W, C).

    Args:
        inputs: A path (of an image or folder), an array (H, W) or (H, W, C), a tensor (H, W) or
            (C, H, W), or a list of these.
    """
    return collect_inputs(inputs, _band_arrays, BAND_FORMS, BAND_SUFFIXES)


def _band_arrays(item: Any) -> list[Pixels]:
    """Return an array or tensor as images (H, W, C): one, or none if it has another shape."""
    if not isinstance(item, np.ndarray | torch.Tensor) or item.ndim not in (2, 3) or not len(item):
        return []
    values = item if isinstance(item, np.ndarray) else item.detach().cpu().numpy()
    if values.ndim == 3 and isinstance(item, torch.Tensor):
        values = values.transpose(1, 2, 0)
    return [values[:, :, None] if values.ndim == 2 else values]


def _load(path: Path, bands: Bands) -> Pixels:
    """Return all bands of a file (H, W, C); those of an npy file stay on disk until they are used.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is broken.
    """
    suffix = file_suffix(path.name)
    with image_errors(path):
        if suffix == ARRAY:
            values = np.load(plain_file(path), mmap_mode="r", allow_pickle=False)
            return _channels_last(values, bands)
        return _read_tiff(path) if suffix in TIFF else _read_image(path)


def _channels_last(values: Pixels, bands: Bands) -> Pixels:
    """Return an array (H, W), (H, W, C) or (C, H, W) as (H, W, C)."""
    numbers = values.dtype.kind in "biufc"
    if numbers and values.ndim == 2:
        return values[:, :, None]
    if numbers and values.ndim == 3 and 0 not in values.shape:
        first, last = values.shape[0], values.shape[2]
        if first != last and bands.total in (first, last):
            return values if last == bands.total else values.transpose(1, 2, 0)
        if first != last:
            return values if last < first else values.transpose(1, 2, 0)
    raise ValueError(
        f"it holds {values.shape} of {values.dtype}, not numbers (H, W), (H, W, bands) or (bands, "
        "H, W) with fewer bands than rows"
    )


def _pages(file: tifffile.TiffFile) -> list[Any]:
    """Return the pages of a TIFF that hold bands, not a smaller copy or a mask.

    Raises:
        ValueError: They have different sizes.
    """
    pages: list[Any] = [page.aspage() for page in file.pages]
    whole_pages = [page for page in pages if not (page.is_reduced or page.is_mask)]
    sizes = sorted({(page.imagelength, page.imagewidth) for page in whole_pages})
    deep = any(page.imagedepth > 1 for page in whole_pages)
    if deep or len(sizes) != 1 or sizes[0][0] * sizes[0][1] > MAX_PIXELS:
        raise ValueError(
            f"its pages are of {len(sizes)} sizes, {first_few(sizes)}, instead of one of at most "
            f"{MAX_PIXELS:,} pixels"
        )
    return whole_pages


def _read_tiff(path: Path) -> Pixels:
    """Return all bands of all pages."""
    with tifffile.TiffFile(plain_file(path)) as file:
        measurements = []
        for page in _pages(file):
            values = page.asarray()
            values = values[:, :, None] if values.ndim == 2 else values
            measurements.append(values.transpose(1, 2, 0) if page.axes == "SYX" else values)
    return measurements[0] if len(measurements) == 1 else np.concatenate(measurements, axis=2)


def _read_image(path: Path) -> Pixels:
    """Return the bands of another image file."""
    content = plain_file(path).read_bytes()
    if content.startswith(PNG_START) and content[PNG_DEPTH_AT : PNG_DEPTH_AT + 1] == b"\x10":
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return decode_png(raw, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
    image = decode(path)
    _check_unscaled(content, image)
    pixels = np.asarray(image.convert(MODES[image.mode]) if image.mode in MODES else image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _check_unscaled(content: bytes, image: Image.Image) -> None:
    """Refuse values that Pillow scales to 8 or 16 bits: odd depths, and colours above 8 bits.

    Raises:
        ValueError: The file has such values.
    """
    largest = None
    if image.format == "PPM" and (measurements := PNM_LARGEST.match(content)) is not None:
        largest = int(measurements[1])
    elif image.format == "JPEG2000" and (start := content.find(JP2_START)) >= 0:
        largest = 2 ** ((content[start + JP2_DEPTH_AT] & 0x7F) + 1) - 1
    whole_pages = (255,) if len(image.getbands()) > 1 else (255, 65_535)
    if largest is not None and largest not in whole_pages:
        raise ValueError(
            f"its values go up to {largest:,}, which Pillow scales; save it as TIFF, or as PNG of "
            "16 bits"
        )
