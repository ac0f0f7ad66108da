"""Checks of image headers and file ends before training, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from datamodules.files.decoding import (
    ORIENTATION,
    UPRIGHT,
    check_pixel_count,
    decode,
    image_errors,
    plain_file,
)

THREADS = 8  # They wait for the disk or a file server, not for the processor.
CHUNK = 256
# Last bytes of a whole file; cameras may append more.
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 65536
SWAPPED = (5, 6, 7, 8)  # EXIF orientations that swap height and width


def check_each(check: Callable[[int], None], count: int, deadline: float) -> int:
    """Call a check for 0, 1, ... until all are done or the time is over.

    Args:
        check: Raises an error if the sample is broken.
        count: Number of samples.
        deadline: Time limit by ``time.monotonic``.

    Returns:
        Number of samples that were checked.
    """
    position = 0
    with ThreadPoolExecutor(THREADS) as pool:
        while position < count and time.monotonic() < deadline:
            chunk = range(position, min(position + CHUNK, count))
            for _ in pool.map(check, chunk):
                pass
            position = chunk.stop
    return position


class Header(NamedTuple):
    """Size and EXIF orientation of an image."""

    width: int
    height: int
    orientation: int


def read_header(path: str | Path, *, upright: bool = False) -> Header:
    """Check the header of an image and its end; a file that seems cut off is decoded.

    Args:
        path: The image file.
        upright: As in ``load_rgb``.

    Returns:
        Width, height and EXIF orientation (1 if unknown).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, truncated, too large or not an image.
    """
    with image_errors(path), Image.open(plain_file(path)) as image:
        check_pixel_count(image)
        width, height = image.size
        end = ENDS.get(image.format or "")
        orientation = image.getexif().get(ORIENTATION, UPRIGHT)
        # Pillow rotates a TIFF by itself and reports the rotated size.
        swapped = upright and orientation in SWAPPED and image.format != "TIFF"
    if end is not None and end not in _tail(Path(path)):
        decode(path)
    size = (height, width) if swapped else (width, height)
    return Header(*size, orientation if orientation in range(1, 9) else UPRIGHT)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read()
