"""Images to predict, which have no labels: files, or pictures in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from datamodules.files import images_at, load_rgb, to_rgb

FORMS = (
    "an image is a path, a PIL image, a uint8 array (H, W, 3) of RGB values or such a tensor "
    "(3, H, W)"
)


class Pictures:
    """Unlabelled images as a dataset.

    Args:
        images: Files and pictures.
        prepare: Makes the sample of an 8-bit RGB image, its name and its index.
        upright: Turn images as their EXIF orientation says.
    """

    def __init__(
        self,
        images: Sequence[Path | Image.Image],
        prepare: Callable[[Image.Image, str, int], Any],
        *,
        upright: bool,
    ) -> None:
        self.images, self.prepare, self.upright = tuple(images), prepare, upright

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def name(self, index: int) -> str:
        """The file of an image, or its number."""
        image = self.images[index]
        return str(image) if isinstance(image, Path) else f"image {index}"

    def __getitem__(self, index: int, /) -> Any:
        """Get the sample of an image."""
        image, name = self.images[index], self.name(index)
        if isinstance(image, Path):
            image = load_rgb(image, upright=self.upright)
        else:
            image = to_rgb(ImageOps.exif_transpose(image) if self.upright else image, name)
        return self.prepare(image, name, index)


def as_images(given: Any) -> list[Path | Image.Image]:
    """One image or several, in any form that people have them in.

    Args:
        given: A path (of a folder, all its images), a PIL image, an array, a tensor, or a list.

    Raises:
        ValueError: Something else, or no image at all.
        FileNotFoundError: A path that does not exist.
    """
    items = list(given) if isinstance(given, list | tuple) else [given]
    images: list[Path | Image.Image] = []
    for item in items:
        images += images_at(item) if isinstance(item, str | Path) else [_picture(item)]
    if not images:
        raise ValueError(f"there are no images to predict; {FORMS}")
    return images


def _picture(item: Any) -> Image.Image:
    if isinstance(item, Image.Image):
        return item
    if isinstance(item, torch.Tensor):
        if item.dtype != torch.uint8 or item.ndim != 3 or item.shape[0] != 3:
            raise ValueError(f"a tensor {tuple(item.shape)} of {item.dtype} is no image; {FORMS}")
        return Image.fromarray(item.permute(1, 2, 0).contiguous().cpu().numpy())
    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] != 3:
            raise ValueError(f"an array {item.shape} of {item.dtype} is no image; {FORMS}")
        return Image.fromarray(np.ascontiguousarray(item))
    raise ValueError(f"a {type(item).__name__} is no image; {FORMS}")
