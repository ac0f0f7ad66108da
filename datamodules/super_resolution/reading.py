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
from datamodules.files.folders import file_suffix, find_images

PNG, DEPTH_AT = b"\x89PNG\r\n\x1a\n", 24  # of a PNG: its first bytes, and the place of its depth
TIFF = (".tif", ".tiff")
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


def collect(given: Any) -> list[Path | Pixels]:
    """Return one or several images as paths and arrays.

    Args:
        given: A path (of an image or folder), a PIL image, an array (H, W) or (H, W, C), a tensor
            (C, H, W), or a list of these; of uint8, uint16, or floats from 0 to 1.

    Raises:
        ValueError: The type is unsupported, or the list is empty.
    """
    items = list(given) if isinstance(given, list | tuple) else [given]
    images: list[Path | Pixels] = []
    for item in items:
        if isinstance(item, str | Path):
            images += find_images(item)
        elif isinstance(item, Image.Image):
            images.append(pil_pixels(item, "the image"))
        elif isinstance(item, np.ndarray | Tensor):
            images.append(array_pixels(item))
        else:
            raise ValueError(
                f"{type(item).__name__} is not an image; pass a path, a PIL image, an array "
                "(H, W, 3) or a tensor (3, H, W)"
            )
    if not images:
        raise ValueError("the list of images to enlarge is empty; pass at least one")
    return images


def read_pixels(path: Path) -> Pixels:
    """Read an image file upright: (H, W, C) of uint8 or uint16 with C = 1 to 4."""
    if file_suffix(path.name) in TIFF:
        with image_errors(path):
            pixels = tifffile.imread(plain_file(path))
        if pixels.dtype == np.uint16 and pixels.ndim in (2, 3):
            return _with_channels(pixels, str(path))
    content = plain_file(path).read_bytes() if is_deep_png(path) else b""
    if content:
        with image_errors(path):
            try:
                raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                decoded = decode_png(raw, ImageReadMode.UNCHANGED)
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        return decoded.permute(1, 2, 0).numpy()
    return pil_pixels(ImageOps.exif_transpose(decode(path)), str(path))


def is_deep_png(path: Path) -> bool:
    """Return True for a PNG of 16 bits per channel, which Pillow would cut to 8."""
    with image_errors(path), plain_file(path).open("rb") as file:
        start = file.read(DEPTH_AT + 1)
    return start.startswith(PNG) and start[DEPTH_AT:] == b"\x10"


def pil_pixels(image: Image.Image, name: str) -> Pixels:
    """Convert any mode of Pillow to (H, W, C) of uint8 or uint16."""
    if image.mode == "F":
        raise ValueError(f"{name} has floating-point pixels; save it with 8 or 16 bits per channel")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        return values.clip(0, 65535).astype(np.uint16)[..., None]
    if image.mode not in ("L", "LA", "RGB", "RGBA"):
        has_alpha = image.mode in ("P", "PA", "La", "RGBa") and image.has_transparency_data
        image = image.convert("L" if image.mode == "1" else "RGBA" if has_alpha else "RGB")
    return _with_channels(np.asarray(image), name)


def array_pixels(values: Pixels | Tensor) -> Pixels:
    """Convert an array (H, W, C) or tensor (C, H, W) to (H, W, C) of uint8 or uint16.

    Raises:
        ValueError: It has another shape or type.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.movedim(0, -1) if values.ndim == 3 else values).numpy()
    what = f"the array {tuple(values.shape)} of {values.dtype}"
    if np.issubdtype(values.dtype, np.floating):
        if not (0 <= values.min() and values.max() <= 1):
            raise ValueError(f"{what} has floats outside 0 to 1; divide them by their range")
        values = np.round(values.astype(np.float64) * 65535).astype(np.uint16)
    if values.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"{what} is not an image; pass uint8, uint16, or floats from 0 to 1")
    return _with_channels(values, what)


def _with_channels(pixels: Pixels, name: str) -> Pixels:
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4) or pixels.size == 0:
        raise ValueError(
            f"{name} has the shape {tuple(pixels.shape)}; an image has one to four channels, last"
        )
    return pixels
