"""Pictures of an enlargement: low resolution, bicubic, ours and the truth, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE = 240  # of a panel, at least
LINE, GAP = 18, 6


class Panel(NamedTuple):
    """Picture with its title and what is printed below it."""

    picture: Image.Image
    title: str
    caption: str


def to_picture(image: Tensor) -> Image.Image:
    """Convert values (3, H, W) from 0 to 1 to an 8-bit picture."""
    values = image.detach().float().cpu().clamp(0, 1) * 255
    return Image.fromarray(values.round().permute(1, 2, 0).numpy().astype(np.uint8))


def centre(image: Tensor, side: int) -> Tensor:
    """Crop (3, H, W) to at most ``side`` rows and columns in the middle."""
    height, width = image.shape[1:]
    top, x = max(height - side, 0) // 2, max(width - side, 0) // 2
    return image[:, top : top + side, x : x + side]


def draw_panels(panels: Sequence[Panel]) -> Image.Image:
    """Draw panels in a row, enlarged by a whole factor without smoothing."""
    largest = max(panel.picture.width for panel in panels)
    height = max(panel.picture.height for panel in panels)
    factor = max(1, -(-SIDE // largest))
    width, height = factor * largest, factor * height
    size = (len(panels) * (width + GAP) + GAP, height + 2 * LINE + 2 * GAP)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, panel in enumerate(panels):
        x = GAP + index * (width + GAP)
        picture = panel.picture.resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(picture, (x, LINE + GAP))
        draw.text((x, GAP - 2), panel.title, fill="black", font=font)
        draw.text((x, LINE + GAP + height + 1), panel.caption, fill="black", font=font)
    return sheet


def caption(figures: Mapping[str, float]) -> str:
    """Return PSNR and SSIM in words; empty without them."""
    if not figures:
        return ""
    return f"{figures['psnr']:.2f} dB, SSIM {figures['ssim']:.4f}"
