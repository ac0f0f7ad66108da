"""PNG files of 8 or 16 bits per channel, written stripe by stripe.

Pillow cannot write 16 bits per colour, and takes whole images.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

KINDS = {1: 0, 2: 4, 3: 2, 4: 6}  # number of channels -> colour type
SUB = 1  # filter: each byte minus that of the pixel at its left
LEVEL = 4


def write_png(file: BinaryIO, stripes: Iterable[NDArray[Any]], height: int) -> None:
    """Write stripes (h, W, C) of uint8 or uint16 from top to bottom as one image.

    Args:
        file: Opened for writing.
        stripes: At least one; all of the same width and type.
        height: Sum of their heights.
    """
    packer = zlib.compressobj(LEVEL)
    begun = False
    for stripe in stripes:
        if not begun:
            _, width, channels = stripe.shape
            bits = 8 * stripe.dtype.itemsize
            header = struct.pack(">IIBBBBB", width, height, bits, KINDS[channels], 0, 0, 0)
            file.write(b"\x89PNG\r\n\x1a\n")
            _write_chunk(file, b"IHDR", header)
            begun = True
        _write_chunk(file, b"IDAT", packer.compress(_filtered(stripe)))
    _write_chunk(file, b"IDAT", packer.flush())
    _write_chunk(file, b"IEND", b"")


def _filtered(stripe: NDArray[Any]) -> bytes:
    """Return the bytes of a stripe's rows, each behind the number of its filter."""
    height, width, channels = stripe.shape
    step = channels * stripe.dtype.itemsize
    big = np.ascontiguousarray(stripe, stripe.dtype.newbyteorder(">"))
    rows = big.view(np.uint8).reshape(height, width * step)
    filtered = np.full((height, width * step + 1), SUB, np.uint8)
    filtered[:, 1 : step + 1] = rows[:, :step]
    np.subtract(rows[:, step:], rows[:, :-step], out=filtered[:, step + 1 :])
    return filtered.tobytes()


def _write_chunk(file: BinaryIO, name: bytes, content: bytes) -> None:
    if content or name == b"IEND":
        check = zlib.crc32(name + content)
        file.write(struct.pack(">I", len(content)) + name + content + struct.pack(">I", check))
