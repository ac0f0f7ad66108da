"""Finds images on disk, decodes them strictly, and words complaints about files."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
)
ORIENTATION, UPRIGHT = 0x0112, 1  # a tag of EXIF, and its usual value
MAX_PIXELS = 178_956_970  # Pillow refuses larger images as decompression bombs.


def first_few(items: Iterable[object], limit: int = 5) -> str:
    """The first items as text, with the total where more exist."""
    listed = list(items)
    text = ", ".join(str(item) for item in listed[:limit])
    return f"{text}, ... ({len(listed)} in all)" if len(listed) > limit else text


def list_images(folder: Path) -> list[str]:
    """Sorted names of the image files directly in a folder; hidden and other files are left out."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".")
            and Path(entry.name).suffix.lower() in IMAGE_SUFFIXES
            # A dangling link counts, so that decoding names it.
            and not entry.is_dir(follow_symlinks=False)
        )


def list_folders(folder: Path) -> list[str]:
    """Sorted names of the visible folders directly in a folder."""
    with os.scandir(folder) as entries:
        # Path.is_dir, unlike the entry's own, is False for a link that leads to itself.
        return sorted(e.name for e in entries if not e.name.startswith(".") and Path(e).is_dir())


def require_folder(folder: Path, remedy: str) -> None:
    """Raise ``FileNotFoundError`` with the remedy unless the folder exists."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; {remedy}")


def require_names(missing: Collection[str], what: str, remedy: str) -> None:
    """Raise ``FileNotFoundError`` naming the first few missing files, if there are any."""
    if missing:
        raise FileNotFoundError(f"{len(missing)} {what}: {first_few(sorted(missing))}; {remedy}")


def images_at(path: str | Path) -> list[Path]:
    """The image itself, or all images of a folder, for prediction."""
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"the input {path} is neither an image nor a folder of images")
    names = list_images(path)
    if not names:
        raise ValueError(f"no images in the input {path}; known endings: {sorted(IMAGE_SUFFIXES)}")
    return [path / name for name in names]


def decode(path: str | Path) -> Image.Image:
    """Decode a whole image file of any mode, or say why that is impossible.

    Source: a strict stand-in for OpenCV's reader, which fills the missing half of a JPEG with grey.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, no image, truncated or too large.
    """
    # Given a name, Pillow maps an uncompressed TIFF into memory and scrambles one that it turns.
    with STRICT, readable(path), plain_file(path).open("rb") as file, Image.open(file) as image:
        image.load()
        return image


def decode_bytes(content: bytes, name: str) -> Image.Image:
    """Decode the bytes of a whole image file as ``decode`` does.

    Args:
        content: Of the file.
        name: What messages call it.

    Raises:
        ValueError: The file is empty, no image, truncated or too large.
    """
    try:
        with STRICT, readable(name), Image.open(io.BytesIO(content)) as image:
            image.load()
            return image
    except (FileNotFoundError, NotADirectoryError):  # readable has looked for it on the disk
        reason = "is no image, whatever its name says" if content else "is empty (0 bytes)"
        raise ValueError(f"{name} {reason}; replace or remove it") from None


class Strictness(contextlib.AbstractContextManager[None]):
    """Lets Pillow refuse truncated files: some libraries switch tolerance on for everybody.

    Pillow has one switch for all threads. It is put back when the last thread has decoded.
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


STRICT = Strictness()


def plain_file(path: str | Path) -> Path:
    """The path, if reading it can neither wait for another program nor last for ever.

    Raises:
        OSError: A pipe, a device, a socket or a folder.
    """
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is a pipe, device or folder, no plain file")
    return path


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Let what Pillow raises over a file leave as an error that says what is wrong with it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, no image, truncated or too large.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"image file {path} does not exist") from error
    except UnidentifiedImageError as error:
        empty = Path(path).stat().st_size == 0
        reason = "is empty (0 bytes)" if empty else "is not an image, whatever its name says"
        raise ValueError(f"{path} {reason}; replace or remove it") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} has more than {MAX_PIXELS:,} pixels; make it smaller") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); replace it") from error


def to_rgb(image: Image.Image, path: str | Path) -> Image.Image:
    """Convert any mode to 8-bit RGB by fixed rules.

    Grey is repeated, palettes are looked up, alpha is dropped, CMYK goes through Pillow's formula,
    16-bit values keep their high byte, animations their first frame.
    """
    if image.mode == "F":
        raise ValueError(
            f"{path} holds floating-point pixels; save it with 8 or 16 bits per channel"
        )
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)  # Pillow alone would clip 16 bits at 255.
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def load_rgb(path: str | Path, *, upright: bool) -> Image.Image:
    """Decode an image file strictly into 8-bit RGB.

    Args:
        path: The image file.
        upright: Turn the image as its EXIF orientation says. OpenCV does (dense tasks), timm and
            torchvision do not (classification), and published numbers depend on each.
    """
    image = decode(path)
    # Pillow would copy an image that stands upright.
    if upright and not is_upright(image):
        image = ImageOps.exif_transpose(image)
    return to_rgb(image, path)


def is_upright(image: Image.Image) -> bool:
    """Whether an image stands as its EXIF data say that it is to be seen."""
    return bool(image.getexif().get(ORIENTATION, UPRIGHT) == UPRIGHT)
