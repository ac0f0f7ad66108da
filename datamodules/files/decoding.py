"""Decodes images strictly and converts them to 8-bit RGB."""

from __future__ import annotations

import contextlib
import io
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError, features

from datamodules.files.folders import file_suffix

ORIENTATION, UPRIGHT = 0x0112, 1  # a tag of EXIF, and its usual value
LARGEST_BYTE = 255
DARKEST = 4095  # the largest value of 12 bits, of which 4 bits stay
_dark: list[str] = []  # the image that was warned of
MAX_PIXELS = 178_956_970  # Pillow refuses larger images as decompression bombs.


@contextlib.contextmanager
def open_image(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file strictly, with ``image_errors`` and a limit on its pixels."""
    # Given a name, Pillow maps an uncompressed TIFF into memory and scrambles it when rotating.
    with STRICT, image_errors(path), plain_file(path).open("rb") as file, Image.open(file) as image:
        check_pixel_count(image)
        yield image


def decode(path: str | Path) -> Image.Image:
    """Decode a whole image file of any mode, strictly.

    OpenCV, the authors' reader, fills the missing half of a JPEG with grey; this raises instead.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, truncated, too large or not an image.
    """
    with open_image(path) as image:
        image.load()
        return image


def check_pixel_count(image: Image.Image) -> None:
    """Check the pixel count in the header of an opened image.

    Raises:
        DecompressionBombError: The image has too many pixels; ``image_errors`` rewords this.
    """
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{image.width}x{image.height}")


def decode_bytes(content: bytes, name: str) -> Image.Image:
    """Decode the bytes of a whole image file as ``decode`` does.

    Args:
        content: Bytes of the file.
        name: Name of the file in messages.

    Raises:
        ValueError: The file is empty, truncated, too large or not an image.
    """
    with STRICT, image_errors(name, content), Image.open(io.BytesIO(content)) as image:
        check_pixel_count(image)
        image.load()
        return image


class StrictDecoding(contextlib.AbstractContextManager[None]):
    """Context in which Pillow raises on truncated files, even if a library made it tolerant.

    Pillow has one switch for all threads. The last thread to leave restores it.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._tolerant = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._tolerant = ImageFile.LOAD_TRUNCATED_IMAGES
            self._users += 1
            ImageFile.LOAD_TRUNCATED_IMAGES = False

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._tolerant


STRICT = StrictDecoding()


def plain_file(path: str | Path) -> Path:
    """Return the path after a check that it is a regular file, which reading cannot block on.

    Raises:
        OSError: The path is a pipe, device, socket or folder.
    """
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is a pipe, device or folder, not a regular file")
    return path


@contextlib.contextmanager
def image_errors(path: str | Path, content: bytes | None = None) -> Iterator[None]:
    """Turn what Pillow and other readers raise over a file into an error that names it.

    Args:
        path: The file.
        content: Its bytes, if they come from another place than this path.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, truncated, too large or not an image.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"image file {path} does not exist") from error
    except Exception as error:  # the readers and their codecs raise all kinds
        reason = f"is truncated or damaged ({error}); replace it"
        if isinstance(error, UnidentifiedImageError):
            size = Path(path).stat().st_size if content is None else len(content)
            kind = "not an image, despite its name" if size else "empty (0 bytes)"
            reason = f"is {kind}; replace or remove it"
            if file_suffix(str(path)) == ".avif" and not features.check("avif"):
                reason = "is AVIF, which this Pillow lacks; type pip install -U pillow"
        elif isinstance(error, Image.DecompressionBombError):
            reason = f"has more than {MAX_PIXELS:,} pixels; make it smaller"
        raise ValueError(f"{path} {reason}") from error


def to_rgb(image: Image.Image, path: str | Path) -> Image.Image:
    """Convert any mode to 8-bit RGB by fixed rules.

    Grey is repeated, palettes are looked up, alpha is dropped and CMYK uses Pillow's formula.
    16-bit values keep their high byte, animations their first frame.
    """
    if image.mode.startswith(("F", "I")):
        values = np.asarray(image).astype(np.int64)  # Pillow alone would clip 16 bits at 255.
        greatest = int(values.max())
        if image.mode == "F" or 0 < greatest <= LARGEST_BYTE:
            kind = "floating-point pixels" if image.mode == "F" else "16 bits per pixel"
            raise ValueError(
                f"{path} has {kind} and the largest value {greatest}, so it would be read wrongly "
                "or as black; save it with 8 bits, or 16 bits up to 65535"
            )
        if 0 < greatest <= DARKEST:
            _warn_of_darkness(str(path), greatest)
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _warn_of_darkness(path: str, greatest: int) -> None:
    """Warn of values that become nearly black, at the first image of the first worker."""
    from torch.utils.data import get_worker_info  # commands that only read headers need no torch

    worker = get_worker_info()
    if not _dark and (worker is None or worker.id == 0):
        _dark.append(path)
        warnings.warn(
            f"{path} has 16 bits per pixel but its largest value is {greatest}, so it is read as "
            "nearly black; scale such files to 16 bits, or for class folders and segmentation "
            "folders pass data.bands=1, which keeps their values",
            stacklevel=3,
        )


def load_rgb(path: str | Path, *, upright: bool) -> Image.Image:
    """Decode an image file strictly into 8-bit RGB.

    Args:
        path: The image file.
        upright: Rotate the image by its EXIF orientation. OpenCV does (dense tasks), timm and
            torchvision do not (classification), and published numbers depend on each.
    """
    image = decode(path)
    # Pillow would copy an image that is upright already.
    if upright and not is_upright(image):
        image = ImageOps.exif_transpose(image)
    return to_rgb(image, path)


def is_upright(image: Image.Image) -> bool:
    """Return True if an image is displayed as stored, according to its EXIF data."""
    return bool(image.getexif().get(ORIENTATION, UPRIGHT) == UPRIGHT)
