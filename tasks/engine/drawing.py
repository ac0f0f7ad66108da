"""Parts of pictures of predictions: captions, enlarged photographs, tinted masks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_segmentation_masks

Box = tuple[float, float, float, float]
Colour = Sequence[int]  # red, green, blue
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


MIN_WIDTH = 320
DOTS = "..."
STRETCH = (2, 98)  # percentiles of a band that are drawn black and white
TINY = 1e-12


def open_upright(path: str | Path) -> Image.Image:
    """Open a photograph rotated by its EXIF data, as the annotations of dense tasks expect."""
    # Given a path, Pillow maps an uncompressed TIFF into memory and scrambles it when rotating.
    with Path(path).open("rb") as file, Image.open(file) as image:
        image.load()
    return ImageOps.exif_transpose(image)


def draw_bands(values: NDArray[Any]) -> Image.Image:
    """Return a picture of bands (H, W, C), each stretched between two percentiles.

    It shows the first three bands as red, green and blue; of one or two the first in grey.
    """
    bands = values[:, :, : 3 if values.shape[2] > 2 else 1]
    low, high = np.percentile(bands, STRETCH, axis=(0, 1))
    stretched = (bands - low) / np.maximum(high - low, TINY)
    pixels = (stretched.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(np.repeat(pixels, 3 // pixels.shape[2], axis=2))


def shorten(name: str, width: float, font: Font) -> str:
    """Shorten a name to at most ``width`` pixels, with dots in its middle."""
    if font.getlength(name) <= width:
        return name

    def cut(left_out: int) -> str:
        length = len(name) - left_out
        return name[: (length + 1) // 2].rstrip() + DOTS + name[len(name) - length // 2 :].lstrip()

    fewer = range(1, len(name))
    place = bisect.bisect_left(fewer, True, key=lambda n: font.getlength(cut(n)) <= width)
    return cut(place + 1)


def enlarge(picture: Image.Image) -> tuple[Image.Image, int]:
    """Return a picture at least ``MIN_WIDTH`` wide, and the whole factor it was enlarged by."""
    factor = max(1, math.ceil(MIN_WIDTH / picture.width))
    size = (picture.width * factor, picture.height * factor)
    return picture.convert("RGB").resize(size, Image.Resampling.BICUBIC), factor


def overlap(first: Box, second: Box) -> bool:
    """Return True if two boxes (x1, y1, x2, y2) overlap."""
    across = first[0] < second[2] and second[0] < first[2]
    return across and first[1] < second[3] and second[1] < first[3]


def side_by_side(left: Image.Image, right: Image.Image, titles: tuple[str, str]) -> Image.Image:
    """Place two pictures beside each other under their titles."""
    strip, gap = 20, 6
    sheet = Image.new(
        "RGB", (left.width + right.width + gap, max(left.height, right.height) + strip), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for picture, x, title in ((left, 0, titles[0]), (right, left.width + gap, titles[1])):
        sheet.paste(picture, (x, strip))
        draw.text((x + 2, 2), title, fill="black", font=load_font(14))
    return sheet


def tint(
    canvas: Image.Image, masks: Sequence[NDArray[np.bool_]], colours: Sequence[Colour]
) -> Image.Image:
    """Draw masks (H, W), enlarged to the canvas, in half-transparent colours."""
    if not masks:
        return canvas
    enlarged = [
        Image.fromarray(np.asarray(mask, dtype=bool)).resize(canvas.size, Image.Resampling.NEAREST)
        for mask in masks
    ]
    tinted = draw_segmentation_masks(
        pil_to_tensor(canvas),
        torch.from_numpy(np.stack([np.asarray(mask) for mask in enlarged])),
        alpha=0.5,
        colors=[tuple(colour) for colour in colours],
    )
    return to_pil_image(tinted)


def load_font(size: int) -> Font:
    """Return the font of all captions."""
    return ImageFont.load_default(size)
