"""Pictures of predictions: contact sheets, boxes, masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from scipy import ndimage
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_segmentation_masks

Box = tuple[float, float, float, float]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Tile(NamedTuple):
    """A picture with its predicted class.

    Attributes:
        picture: Picture of any size.
        guess: The predicted class.
        share: Its probability.
        right: True if the prediction is right; None if unknown.
        truth: The right class if the prediction is wrong.
    """

    picture: Image.Image
    guess: str
    share: float
    right: bool | None
    truth: str | None = None


TRUTH_COLOUR = (40, 40, 40)
CAPTION_COLOURS = {True: (40, 160, 60), False: (210, 50, 40), None: (90, 90, 90)}
# Twelve colours that most eyes can distinguish (Paul Tol's "muted" and "bright" sets), repeated
# for more classes.
PALETTE = (
    (68, 119, 170), (238, 102, 119), (34, 136, 51), (204, 187, 68), (102, 204, 238), (170, 51, 119),
    (136, 34, 85), (68, 170, 153), (153, 153, 51), (221, 204, 119), (51, 34, 136), (204, 102, 119),
)  # fmt: skip
MIN_WIDTH = 320
DOTS = "..."
LEAST = 64  # pixels allowed for the name of a narrow segment
PADDING = 2  # between a caption and the ends of its area


def to_image(normalised: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Convert a (3, H, W) tensor, normalised by channel mean and deviation, to a picture."""
    array = normalised.detach().float().cpu().permute(1, 2, 0).numpy() * np.array(std) + mean
    return Image.fromarray((array.clip(0, 1) * 255).round().astype(np.uint8))


def open_upright(path: str | Path) -> Image.Image:
    """Open a photograph rotated by its EXIF data, as the annotations of dense tasks expect."""
    # Given a path, Pillow maps an uncompressed TIFF into memory and scrambles it when rotating.
    with Path(path).open("rb") as file, Image.open(file) as image:
        image.load()
    return ImageOps.exif_transpose(image)


def contact_sheet(tiles: Sequence[Tile], side: int = 128) -> Image.Image:
    """Draw tiles in a nearly square grid, with green (right), red (wrong) or grey captions.

    The caption below a picture has its class and probability, and the right class if that differs.
    """
    columns = max(1, math.ceil(math.sqrt(len(tiles))))
    rows = math.ceil(len(tiles) / columns)
    line, font = 17, _font(13)
    strip = 2 * line if any(tile.truth is not None for tile in tiles) else line
    sheet = Image.new("RGB", (columns * (side + 6) + 6, rows * (side + strip + 6) + 6), "white")
    draw = ImageDraw.Draw(sheet)
    for index, tile in enumerate(tiles):
        left, top = 6 + index % columns * (side + 6), 6 + index // columns * (side + strip + 6)
        picture = tile.picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        sheet.paste(picture, (left, top))
        colour, below = CAPTION_COLOURS[tile.right], top + side + 1
        share = f" {tile.share:.0%}"
        name = shorten(tile.guess, side - font.getlength(share), font)
        draw.text((left, below), name, fill=colour, font=font)
        draw.text((left + side, below), share, fill=colour, font=font, anchor="ra")
        if tile.truth is not None:
            name = shorten(tile.truth, side - font.getlength("is "), font)
            draw.text((left, below + line), f"is {name}", fill=TRUTH_COLOUR, font=font)
    return sheet


def shorten(name: str, width: float, font: Font) -> str:
    """Shorten a name to at most ``width`` pixels, with dots in its middle."""
    if font.getlength(name) <= width:
        return name
    for kept in range(len(name) - 1, 0, -1):
        head = name[: (kept + 1) // 2].rstrip()
        tail = name[len(name) - kept // 2 :].lstrip() if kept // 2 else ""
        if font.getlength(head + DOTS + tail) <= width:
            return head + DOTS + tail
    return DOTS


def enlarge(picture: Image.Image) -> tuple[Image.Image, int]:
    """Return a picture at least ``MIN_WIDTH`` wide, and the whole factor it was enlarged by."""
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
    if masks is not None:
        canvas = _tint(canvas, list(masks), labels)
    draw, font = ImageDraw.Draw(canvas), _font(13)
    scaled = []
    for box, label in zip(boxes, labels, strict=True):
        x1, y1, x2, y2 = (float(value) * factor for value in box)
        scaled.append((x1, y1, max(x1, x2), max(y1, y2)))
        draw.rectangle(scaled[-1], outline=_colour(label), width=2)
    taken: list[Box] = []
    for edges, label, caption in zip(scaled, labels, captions, strict=True):
        caption = shorten(caption, canvas.width - 2 * PADDING, font)
        size = (font.getlength(caption) + 2 * PADDING, 15.0)
        area = _free_place(edges, size, canvas.size, taken)
        if area is None:  # the colour of the box still shows its class
            continue
        taken.append(area)
        if caption:
            draw.rectangle(area, fill=_colour(label))
            draw.text((area[0] + PADDING, area[1]), caption, fill="white", font=font)
    return canvas


def _free_place(
    box: Box, size: tuple[float, float], canvas: tuple[int, int], taken: Sequence[Box]
) -> Box | None:
    """Find a free area for a caption: above its box, below or inside it, or in the nearest line.

    The area lies inside the picture and clear of other captions; None if the picture is full.
    """
    (x1, y1, x2, y2), (width, height) = box, size
    left = min(max(0.0, x1), max(0.0, canvas[0] - width))
    right = min(max(0.0, x2 - width), max(0.0, canvas[0] - width))
    highest = max(0.0, canvas[1] - height)
    lines = [place * (height + 1) for place in range(int(highest // (height + 1)) + 1)]
    lines.sort(key=lambda y: abs(y - y1))
    places = [
        (x, min(max(0.0, y), highest))
        for y in (y1 - height, y2 + 1, y1, y2 - height, *lines)
        for x in (left, right)
    ]
    areas = ((x, y, x + width, y + height) for x, y in places)
    free = (area for area in areas if not any(_meet(area, other) for other in taken))
    return next(free, None)


def _meet(one: Box, other: Box) -> bool:
    across = one[0] < other[2] and other[0] < one[2]
    return across and one[1] < other[3] and other[1] < one[3]


def draw_segments(
    picture: Image.Image,
    labels: NDArray[np.integer],
    names: Sequence[str],
    *,
    background: str | None = None,
) -> Image.Image:
    """Tint every pixel by its class; ignored pixels and ``background`` stay unchanged."""
    canvas, factor = enlarge(picture)
    present = [int(label) for label in np.unique(labels) if label < len(names)]
    present = [label for label in present if names[label] != background]
    canvas = _tint(canvas, [labels == label for label in present], present)
    draw, font = ImageDraw.Draw(canvas), _font(15)
    taken: list[Box] = []
    for label in present:
        row, column, width = inmost(labels == label)
        name = shorten(names[label], min(max(width * factor, LEAST), canvas.width) - 8, font)
        half = font.getlength(name) / 2 + 2
        x = min(max((column + 0.5) * factor, half), canvas.width - half)
        y = min(max((row + 0.5) * factor, 10), canvas.height - 10)
        for line in (0, 20, -20, 40, -40):  # offsets from the middle, where another name may be
            area = (x - half, y + line - 9, x + half, y + line + 9)
            inside = not line or (area[1] >= 0 and area[3] <= canvas.height)
            if inside and not any(_meet(area, other) for other in taken):
                taken.append(area)
                draw.text((x, y + line), name, fill="white", font=font, anchor="mm",
                          stroke_width=2, stroke_fill="black")  # fmt: skip
                break
    return canvas


def inmost(mask: NDArray[np.bool_]) -> tuple[int, int, int]:
    """Return the row and column deepest inside a mask's largest part, and its width there."""
    parts, count = ndimage.label(mask)
    if count > 1:
        sizes = np.bincount(parts.ravel())
        mask = parts == 1 + int(sizes[1:].argmax())
    # The border of the picture counts as an edge.
    depth = ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    row, column = (int(i) for i in np.unravel_index(int(depth.argmax()), depth.shape))
    outside = np.flatnonzero(~mask[row])
    left = outside[outside < column].max(initial=-1)
    right = outside[outside > column].min(initial=mask.shape[1])
    return row, column, int(right - left - 1)


def label_map(
    labels: NDArray[np.uint8], values: Sequence[int], colours: Sequence[Sequence[int]]
) -> Image.Image:
    """Convert labels (H, W) to a palette picture of ``values[label]`` in the classes' colours."""
    picture = Image.fromarray(np.asarray(values, dtype=np.uint8)[labels])
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[list(values)] = np.asarray(colours, dtype=np.uint8)
    picture.putpalette(palette.flatten().tolist())
    return picture


def side_by_side(left: Image.Image, right: Image.Image, titles: tuple[str, str]) -> Image.Image:
    """Place two pictures beside each other under their titles."""
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
    canvas: Image.Image, masks: Sequence[NDArray[np.bool_]], labels: Sequence[int]
) -> Image.Image:
    """Draw masks (H, W), enlarged to the canvas, in half-transparent colours of their labels."""
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
        colors=[_colour(label) for label in labels],
    )
    return to_pil_image(tinted)


def _colour(label: int) -> tuple[int, int, int]:
    return PALETTE[label % len(PALETTE)]


def _font(size: int) -> Font:
    return ImageFont.load_default(size)
