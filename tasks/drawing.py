"""Pictures of predictions: contact sheets, boxes, masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

# A picture, its caption, and whether that is right; None where nobody knows.
Tile = tuple[Image.Image, str, bool | None]
CAPTION_COLOURS = {True: (40, 160, 60), False: (210, 50, 40), None: (90, 90, 90)}
# Twelve colours that stay apart for most eyes (Paul Tol's "muted" and "bright" sets), repeated for
# more classes.
PALETTE = (
    (68, 119, 170), (238, 102, 119), (34, 136, 51), (204, 187, 68), (102, 204, 238), (170, 51, 119),
    (136, 34, 85), (68, 170, 153), (153, 153, 51), (221, 204, 119), (51, 34, 136), (204, 102, 119),
)  # fmt: skip
MIN_WIDTH = 320


def to_image(normalised: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """A (3, H, W) tensor normalised by mean and deviation of its channels, as a picture."""
    array = normalised.detach().float().cpu().permute(1, 2, 0).numpy() * np.array(std) + mean
    return Image.fromarray((array.clip(0, 1) * 255).round().astype(np.uint8))


def open_upright(path: str | Path) -> Image.Image:
    """A photograph turned as its EXIF data says; so the dense tasks' annotations see it."""
    return ImageOps.exif_transpose(Image.open(path))


def contact_sheet(tiles: Sequence[Tile], side: int = 112) -> Image.Image:
    """Tiles in a square-ish grid, the captions green where right, red where wrong, else grey."""
    columns = max(1, math.ceil(math.sqrt(len(tiles))))
    rows = math.ceil(len(tiles) / columns)
    strip = 18
    sheet = Image.new("RGB", (columns * (side + 4) + 4, rows * (side + strip + 4) + 4), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (picture, caption, right) in enumerate(tiles):
        left, top = 4 + index % columns * (side + 4), 4 + index // columns * (side + strip + 4)
        sheet.paste(
            picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC), (left, top)
        )
        draw.text(
            (left + 2, top + side + 1), caption[:18], fill=CAPTION_COLOURS[right], font=_font(13)
        )
    return sheet


def enlarge(picture: Image.Image) -> tuple[Image.Image, int]:
    """A picture at least ``MIN_WIDTH`` wide, and the whole factor it was enlarged by."""
    factor = max(1, math.ceil(MIN_WIDTH / picture.width))
    size = (picture.width * factor, picture.height * factor)
    return picture.convert("RGB").resize(size, Image.Resampling.BICUBIC), factor


def draw_instances(
    picture: Image.Image,
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    captions: Sequence[str],
    masks: NDArray[np.bool_] | None = None,
) -> Image.Image:
    """Draw boxes (x1, y1, x2, y2) with captions, and masks (N, H, W) as a tint."""
    canvas, factor = enlarge(picture)
    for index, mask in enumerate(masks if masks is not None else ()):
        canvas = _tint(canvas, mask, _colour(labels[index]))
    draw = ImageDraw.Draw(canvas)
    for box, label, caption in zip(boxes, labels, captions, strict=True):
        x1, y1, x2, y2 = (float(value) * factor for value in box)
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=_colour(label), width=2)
        area = draw.textbbox((x1, max(0, y1 - 15)), caption, font=_font(13))
        draw.rectangle(area, fill=_colour(label))
        draw.text((x1, max(0, y1 - 15)), caption, fill="white", font=_font(13))
    return canvas


def draw_segments(
    picture: Image.Image,
    labels: NDArray[np.integer],
    names: Sequence[str],
    *,
    background: str | None = None,
) -> Image.Image:
    """Tint every pixel by its class; those ignored or of ``background`` stay as they are."""
    canvas, factor = enlarge(picture)
    present = [int(label) for label in np.unique(labels) if label < len(names)]
    present = [label for label in present if names[label] != background]
    for label in present:
        canvas = _tint(canvas, labels == label, _colour(label))
    draw = ImageDraw.Draw(canvas)
    for label in present:
        rows, columns = np.nonzero(labels == label)
        position = (float(columns.mean()) * factor, float(rows.mean()) * factor)
        draw.text(
            position,
            names[label],
            fill="white",
            font=_font(15),
            anchor="mm",
            stroke_width=2,
            stroke_fill="black",
        )
    return canvas


def label_map(
    labels: NDArray[np.uint8], values: Sequence[int], colours: Sequence[Sequence[int]]
) -> Image.Image:
    """Labels (H, W) as a palette picture that holds ``values[label]``, in the classes' colours."""
    picture = Image.fromarray(np.asarray(values, dtype=np.uint8)[labels])
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[list(values)] = np.asarray(colours, dtype=np.uint8)
    picture.putpalette(palette.flatten().tolist())
    return picture


def side_by_side(left: Image.Image, right: Image.Image, titles: tuple[str, str]) -> Image.Image:
    """Two pictures beside each other under their titles."""
    strip, gap = 20, 6
    sheet = Image.new(
        "RGB", (left.width + right.width + gap, max(left.height, right.height) + strip), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for picture, x, title in ((left, 0, titles[0]), (right, left.width + gap, titles[1])):
        sheet.paste(picture, (x, strip))
        draw.text((x + 2, 2), title, fill="black", font=_font(14))
    return sheet


def _tint(
    canvas: Image.Image, mask: NDArray[np.bool_], colour: tuple[int, int, int]
) -> Image.Image:
    alpha = Image.fromarray(np.asarray(mask, dtype=np.uint8) * 130).resize(
        canvas.size, Image.Resampling.NEAREST
    )
    return Image.composite(Image.new("RGB", canvas.size, colour), canvas, alpha)


def _colour(label: int) -> tuple[int, int, int]:
    return PALETTE[label % len(PALETTE)]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
