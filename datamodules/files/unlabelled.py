"""Images to predict, as files or in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from datamodules.files.decoding import load_rgb, to_rgb
from datamodules.files.folders import find_images

FORMS = (
    "an image is a path, a PIL image, an array (H, W, 3), a tensor (3, H, W) or greyscale (H, W), "
    "of uint8 or of floats from 0 to 1"
)
CHANNELS = (1, 3, 4)  # grey, RGB, and RGB with transparency


class UnlabelledImages:
    """Dataset of images without labels.

    Args:
        images: Files and images in memory.
        prepare: Function from an 8-bit RGB image, its name and its index to a sample.
        upright: Rotate images by their EXIF orientation.
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
        return len(self.images)

    def name(self, index: int) -> str:
        """Return an image's path; for an image in memory, its number."""
        image = self.images[index]
        return str(image) if isinstance(image, Path) else f"image {index}"

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample of an image."""
        image, name = self.images[index], self.name(index)
        if isinstance(image, Path):
            image = load_rgb(image, upright=self.upright)
        else:
            image = to_rgb(ImageOps.exif_transpose(image) if self.upright else image, name)
        return self.prepare(image, name, index)


def collect_images(given: Any) -> list[Path | Image.Image]:
    """Return one or several images, given in any common form, as a list.

    Args:
        given: A path (of an image or folder), a PIL image, an array, a tensor, or a list of these.

    Raises:
        ValueError: The type is unsupported, or the list is empty.
        FileNotFoundError: A path does not exist.
    """
    items = list(given) if isinstance(given, list | tuple) else [given]
    images: list[Path | Image.Image] = []
    for item in items:
        if isinstance(item, str | Path):
            images += find_images(item)
        elif isinstance(item, Image.Image):
            images.append(item)
        elif isinstance(item, torch.Tensor | np.ndarray):
            images += _array_images(item)
        else:
            raise ValueError(f"{type(item).__name__} is not an image; {FORMS}")
    if not images:
        raise ValueError(f"the list of images to predict is empty; {FORMS}")
    return images


def _array_images(values: torch.Tensor | np.ndarray[Any, Any]) -> list[Image.Image]:
    """Return the images of an array or tensor: one, or a batch if it has four axes."""
    description = f"{type(values).__name__} {tuple(values.shape)} of {values.dtype}"
    channels_last = isinstance(values, np.ndarray)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    batch = list(values) if values.ndim == 4 else [values]
    if any(not _is_image(one, channels_last) for one in batch):
        raise ValueError(f"the {description} is not an image; {FORMS}")
    return [_array_image(one, description, channels_last) for one in batch]


def _is_image(values: np.ndarray[Any, Any], channels_last: bool) -> bool:
    if values.ndim == 3:
        return values.shape[2 if channels_last else 0] in CHANNELS and values.size > 0
    return values.ndim == 2 and values.size > 0


def _array_image(
    values: np.ndarray[Any, Any], description: str, channels_last: bool
) -> Image.Image:
    if values.ndim == 3:
        values = values if channels_last else values.transpose(1, 2, 0)
        values = values[:, :, 0] if values.shape[2] == 1 else values
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"the {description} has values from {low:g} to {high:g}; floats must be from "
                "0 to 1, as they are before normalisation"
            )
        values = np.round(values.astype(np.float64) * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise ValueError(f"the {description} is not an image; {FORMS}")
    return Image.fromarray(np.ascontiguousarray(values))
