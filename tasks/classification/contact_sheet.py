"""Contact sheets of classified pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from tasks.engine.drawing import load_font, shorten

TRUTH_COLOUR = (40, 40, 40)
CAPTION_COLOURS = {True: (40, 160, 60), False: (210, 50, 40), None: (90, 90, 90)}


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


def to_image(normalised: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Convert a (3, H, W) tensor, normalised by channel mean and deviation, to a picture."""
    array = normalised.detach().float().cpu().permute(1, 2, 0).numpy() * np.array(std) + mean
    return Image.fromarray((array.clip(0, 1) * 255).round().astype(np.uint8))


def contact_sheet(tiles: Sequence[Tile], side: int = 128) -> Image.Image:
    """Draw tiles in a nearly square grid, with green (right), red (wrong) or grey captions.

    The caption below a picture has its class and probability, and the right class if that differs.
    """
    columns = max(1, math.ceil(math.sqrt(len(tiles))))
    rows = math.ceil(len(tiles) / columns)
    line, font = 17, load_font(13)
    strip = 2 * line if any(tile.truth is not None for tile in tiles) else line
    sheet = Image.new("RGB", (columns * (side + 6) + 6, rows * (side + strip + 6) + 6), "white")
    draw = ImageDraw.Draw(sheet)
    for index, tile in enumerate(tiles):
        x, top = 6 + index % columns * (side + 6), 6 + index // columns * (side + strip + 6)
        picture = tile.picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
        sheet.paste(picture, (x, top))
        colour, below = CAPTION_COLOURS[tile.right], top + side + 1
        share = f" {tile.share:.0%}"
        name = shorten(tile.guess, side - font.getlength(share), font)
        draw.text((x, below), name, fill=colour, font=font)
        draw.text((x + side, below), share, fill=colour, font=font, anchor="ra")
        if tile.truth is not None:
            name = shorten(tile.truth, side - font.getlength("is "), font)
            draw.text((x, below + line), f"is {name}", fill=TRUTH_COLOUR, font=font)
    return sheet
