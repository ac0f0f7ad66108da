"""Images to enlarge: 8 or 16 bits per channel, grey or in colours, with or without alpha."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_png

from datamodules.files.decoding import decode, image_errors, plain_file
from datamodules.files.folders import file_suffix
from datamodules.files.unlabelled import collect_inputs
from datamodules.files.values import refuse

PNG, DEPTH_AT = b"\x89PNG\r\n\x1a\n", 24  # of a PNG: its first bytes, and the place of its depth
TIFF = (".tif", ".tiff")
FORMS = (
    "an image is a path, a PIL image, an array (H, W, C) or a tensor (C, H, W) with one to four "
    "channels, of uint8, uint16 or floats from 0 to 1"
)
Pixels = NDArray[Any]


class ImagesToEnlarge:
    """Dataset of images to enlarge.

    Args:
        images: Files, and images in memory (H, W, C).
    """

    def __init__(self, images: Sequence[Path | Pixels]) -> None:
        self.images = tuple(images)

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """Return an image's path; for an image in memory, its number."""
        image = self.images[index]
        return str(image) if isinstance(image, Path) else f"image {index}"

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``low`` (3, H, W), ``alpha`` (0 or 1, H, W), ``grey``, ``bits``, ``sample_id``."""
        image = self.images[index]
        pixels = read_pixels(image) if isinstance(image, Path) else image
        channels = pixels.shape[2]
        has_alpha, is_grey = channels in (2, 4), channels < 3
        most = np.iinfo(pixels.dtype).max
        values = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(most))
        colours = values[: channels - has_alpha]
        return {
            "low": colours.expand(3, -1, -1).contiguous() if is_grey else colours,
            "alpha": values[channels - has_alpha :],
            "grey": torch.tensor(is_grey),
            "bits": torch.tensor(8 * pixels.dtype.itemsize),
            "sample_id": torch.tensor(index),
        }


def collect(inputs: Any) -> list[Path | Pixels]:
    """Return one or several images as paths and arrays.

    Args:
        inputs: A path (of an image or folder), a PIL image, an array (H, W) or (H, W, C), a tensor
            (C, H, W), or a list of these; of uint8, uint16, or floats from 0 to 1.
    """
    return collect_inputs(inputs, _memory_pixels, FORMS)


def _memory_pixels(item: Any) -> list[Pixels]:
    """Return an image in memory; none if it has another form."""
    if isinstance(item, Image.Image):
        return [pil_pixels(item, "the image")]
    pixels = array_pixels(item) if isinstance(item, np.ndarray | Tensor) else None
    return [] if pixels is None else [pixels]


def read_pixels(path: Path) -> Pixels:
    """Read an image file upright: (H, W, C) of uint8 or uint16 with C = 1 to 4."""
    if file_suffix(path.name) in TIFF:
        with image_errors(path):
            pixels = tifffile.imread(plain_file(path))
        if pixels.dtype == np.uint16 and pixels.ndim in (2, 3):
            return _with_channels(pixels)
    if is_deep_png(path):
        with image_errors(path):
            raw = torch.frombuffer(bytearray(plain_file(path).read_bytes()), dtype=torch.uint8)
            return decode_png(raw, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
    return pil_pixels(ImageOps.exif_transpose(decode(path)), str(path))


def is_deep_png(path: Path) -> bool:
    """Return True for a PNG of 16 bits per channel, which Pillow would cut to 8."""
    with image_errors(path), plain_file(path).open("rb") as file:
        start = file.read(DEPTH_AT + 1)
    return start.startswith(PNG) and start[DEPTH_AT:] == b"\x10"


def pil_pixels(image: Image.Image, name: str) -> Pixels:
    """Convert any mode of Pillow to (H, W, C) of uint8 or uint16."""
    rule = "has floating-point pixels; save it with 8 or 16 bits per channel"
    refuse(name, {rule: image.mode == "F"})
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        return values.clip(0, 65535).astype(np.uint16)[..., None]
    if image.mode not in ("L", "LA", "RGB", "RGBA"):
        has_alpha = image.mode in ("P", "PA", "La", "RGBa") and image.has_transparency_data
        image = image.convert("L" if image.mode == "1" else "RGBA" if has_alpha else "RGB")
    return _with_channels(np.asarray(image))


def array_pixels(values: Pixels | Tensor) -> Pixels | None:
    """Return an array (H, W, C) or tensor (C, H, W) as (H, W, C) of uint8 or uint16.

    None for another shape or type.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.movedim(0, -1) if values.ndim == 3 else values).numpy()
    pixels = _with_channels(values)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or pixels.size == 0:
        return None
    if np.issubdtype(pixels.dtype, np.floating) and 0 <= pixels.min() and pixels.max() <= 1:
        pixels = np.round(pixels.astype(np.float64) * 65535).astype(np.uint16)
    return pixels if pixels.dtype in (np.uint8, np.uint16) else None


def _with_channels(pixels: Pixels) -> Pixels:
    return pixels[..., None] if pixels.ndim == 2 else pixels
