"""Images as OpenCV and the MM toolkits have them: arrays (H, W, 3) in the order BGR.

OpenCV decodes the usual JPEG, to the pixels that Pillow finds: Pillow's would be copied twice more,
which takes a quarter of its time. All else is Pillow's, and so is every complaint.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.files import is_upright, load_rgb, plain_file, readable

Pixels = NDArray[np.uint8]


def to_bgr(image: Image.Image) -> Pixels:
    """The pixels of an RGB image, which a caller may write to."""
    import cv2

    return cast(Pixels, cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2BGR))


def load_bgr(path: str | Path, *, upright: bool) -> Pixels:
    """The pixels of ``files.load_rgb``, with its arguments and errors."""
    with readable(path):
        content = plain_file(path).read_bytes()
        with Image.open(io.BytesIO(content)) as header:
            usual = header.format == "JPEG" and header.mode in ("RGB", "L")
            usual = usual and (not upright or is_upright(header))
    pixels = _decode(content) if usual and opencv_is_strict() else None
    return to_bgr(load_rgb(path, upright=upright)) if pixels is None else pixels


@cache
def opencv_is_strict() -> bool:
    """Whether OpenCV refuses a JPEG without its end, as 4.12 does; older ones fill it with grey."""
    import cv2

    whole = cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1]
    return _decode(whole.tobytes()[:-2]) is None


def _decode(content: bytes) -> Pixels | None:
    """The pixels as they are stored, or None for what is broken."""
    import cv2

    how = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    return cast(Pixels | None, cv2.imdecode(np.frombuffer(content, np.uint8), how))
