"""Looks at files before training does: their headers, and whether they are whole, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from datamodules.files import ORIENTATION, UPRIGHT, decode, plain_file, readable, refuse_large

THREADS = 8  # they wait for the disk, or for a file server
CHUNK = 256
# What ends a whole file; cameras may write more after it.
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 65536
TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


def check_each(check: Callable[[int], None], count: int, deadline: float) -> int:
    """Call a check for 0, 1, ... until all are done or the time is over.

    Args:
        check: Raises an error where something is wrong.
        count: Number of samples.
        deadline: By ``time.monotonic``.

    Returns:
        How many were checked.
    """
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:
        while done < count and time.monotonic() < deadline:
            chunk = range(done, min(done + CHUNK, count))
            for _ in pool.map(check, chunk):
                pass
            done = chunk.stop
    return done


class Header(NamedTuple):
    """Size and EXIF orientation of an image."""

    width: int
    height: int
    orientation: int


def check_header(path: str | Path, *, upright: bool = False) -> tuple[int, int]:
    """Read the header of an image, and its end; what seems cut off is decoded to see.

    Args:
        path: The image file.
        upright: As in ``load_rgb``.

    Returns:
        Width and height.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is empty, no image, truncated or too large.
    """
    header = read_header(path, upright=upright)
    return header.width, header.height


def read_header(path: str | Path, *, upright: bool = False) -> Header:
    """``check_header`` with the orientation that the file's EXIF data say, 1 if they say none."""
    with readable(path), Image.open(plain_file(path)) as image:
        refuse_large(image)
        width, height = image.size
        end = ENDS.get(image.format or "")
        orientation = image.getexif().get(ORIENTATION, UPRIGHT)
        # Pillow turns a TIFF by itself and has done so with its size.
        turned = upright and orientation in TURNED and image.format != "TIFF"
    if end is not None and end not in _tail(Path(path)):
        decode(path)
    size = (height, width) if turned else (width, height)
    return Header(*size, orientation if orientation in range(1, 9) else UPRIGHT)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read()
