"""Reads the pixels of a mask as the file stores them.

Labels must stay as stored, but Pillow prepares pictures for display. It scales grey values of 1, 2
and 4 bits to 255, keeps the high byte of 16-bit colours, and inverts white-is-zero TIFFs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from datamodules.files.decoding import is_upright, open_image

FORMATS = ("PNG", "BMP", "TIFF")
REMEDY = "save labels as an 8-bit grey or palette PNG"
# Factor by which Pillow scales grey values, by the packing that it names in ``tile``.
SCALES = {"L;2": 85, "L;2R": 85, "L;4": 17, "L;4R": 17}
BMP_BITS = {"1": 1, "P;1": 1, "P;4": 4, "L": 8, "P": 8}
GREY = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")
# Tags of a TIFF.
SUBFILE, PHOTOMETRIC, SAMPLE_FORMAT = 254, 262, 339
REDUCED_OR_MASK = 0b101  # pages that repeat the first one smaller, or hold its transparency
SIGNED = 2

Pixels = NDArray[Any]


def read_pixels(path: str | Path, *, colours: bool = False) -> Pixels:
    """Read a mask, rotated by its own EXIF orientation.

    Args:
        path: A PNG, BMP or TIFF.
        colours: Look up palettes and repeat grey values, for masks with colours as labels.

    Returns:
        Integers (H, W) as stored: grey values or palette indices. For masks in colours, and for
        all masks with ``colours``, 8-bit RGB values (H, W, 3).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is broken, or Pillow would change what it stores.
    """
    with open_image(path) as opened:
        packing = _packing(opened)
        fault = _fault(opened, packing, path)
        if fault is None:
            opened.load()
    image: Image.Image = opened
    if fault is None and image.mode in ("LA", "RGBA"):
        fault = _alpha_fault(image)
    if fault is not None:
        raise ValueError(f"mask {path} {fault}")
    if image.mode in ("LA", "RGBA"):
        image = image.convert(image.mode[:-1])  # exact, as all pixels are opaque
    if not is_upright(image):
        image = ImageOps.exif_transpose(image)
    if colours and image.mode in ("1", "L", "P"):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if colours or image.mode == "RGB":
        return pixels
    if image.mode == "1":
        return pixels.astype(np.uint8)
    if packing == "I;32N":  # unsigned in the file, signed in Pillow
        return pixels.view(np.uint32)
    return pixels // np.uint8(SCALES[packing]) if packing in SCALES else pixels


def is_grey(pixels: Pixels) -> bool:
    """Return True if all three channels of RGB values are equal."""
    first = pixels[..., 0]
    return bool((first == pixels[..., 1]).all() and (first == pixels[..., 2]).all())


def _packing(image: Any) -> str:
    """Return Pillow's name for how a file stores its pixels, known until they are loaded."""
    arguments = image.tile[0][3] if image.tile else ""
    return str(arguments if isinstance(arguments, str) else arguments[0])


def _fault(image: Image.Image, packing: str, path: str | Path) -> str | None:
    """Return why a mask's labels cannot be read, judging by its header; None if they can."""
    if image.format not in FORMATS:
        return f"is a {image.format} file, despite its name; {REMEDY}"
    if image.mode not in (*GREY, "LA", "RGB", "RGBA"):
        return f"has pixels of mode {image.mode}; {REMEDY}"
    if ";16" in packing and not image.mode.startswith("I"):
        return f"has 16 bits per channel and more than one channel; {REMEDY}"
    if image.format == "TIFF":
        return _tiff_fault(image)
    if packing in BMP_BITS and image.format == "BMP" and _bmp_bits(path) != BMP_BITS[packing]:
        return f"is a BMP with a grey palette, which Pillow misreads; {REMEDY}"
    pages = getattr(image, "n_frames", 1)
    return f"has {pages} pages; {REMEDY}" if pages > 1 else None


def _tiff_fault(image: Any) -> str | None:
    tags = image.tag_v2
    if tags.get(PHOTOMETRIC) == 0:
        return f"is a TIFF in which 0 is white (PhotometricInterpretation); {REMEDY}"
    if SIGNED in np.atleast_1d(tags.get(SAMPLE_FORMAT, 1)) and image.mode == "L":
        return f"is a TIFF of signed bytes (SampleFormat); {REMEDY}"
    for page in range(1, image.n_frames):
        image.seek(page)
        if not image.tag_v2.get(SUBFILE, 0) & REDUCED_OR_MASK:
            return f"has {image.n_frames} pages; {REMEDY}"
    image.seek(0)
    return None


def _alpha_fault(image: Image.Image) -> str | None:
    clear = int((np.asarray(image.getchannel("A")) < 255).sum())
    if not clear:
        return None
    return f"has {clear:,} transparent pixels; save it without an alpha channel"


def _bmp_bits(path: str | Path) -> int:
    with Path(path).open("rb") as file:
        header = file.read(30)
    place = 24 if header[14] == 12 else 28  # OS/2's short header has it earlier
    return int.from_bytes(header[place : place + 2], "little")
