"""Images to predict, as files or in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from datamodules.files.decoding import load_rgb, to_rgb
from datamodules.files.folders import IMAGE_SUFFIXES, find_images

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


def collect_inputs(
    inputs: Any,
    convert: Callable[[Any], Sequence[Any]],
    forms: str,
    suffixes: Set[str] = IMAGE_SUFFIXES,
) -> list[Any]:
    """Return one or several images as paths and images in memory.

    Args:
        inputs: A path (of an image or folder), an image in memory, or a list of these.
        convert: Function from an input in memory to its images; none if it has another form.
        forms: Description of the forms, for messages.
        suffixes: Endings of images in folders.

    Raises:
        ValueError: A form is unsupported, or the list is empty.
        FileNotFoundError: A path does not exist.
    """
    items = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    images: list[Any] = []
    strays = [] if items else ["the list of images to predict is empty"]
    for item in items:
        is_path = isinstance(item, str | Path)
        converted = find_images(item, suffixes) if is_path else convert(item)
        images += converted
        if not len(converted):
            strays.append(f"{_describe(item)} is not an image")
    if strays:
        raise ValueError(f"{strays[0]}; {forms}")
    return images


def _describe(item: Any) -> str:
    """Return type, shape and range of an input in memory."""
    text = f"the {type(item).__name__}"
    if isinstance(item, torch.Tensor | np.ndarray):
        text += f" {tuple(item.shape)} of {item.dtype}"
        if math.prod(item.shape) and "float" in str(item.dtype):
            text += f" from {float(item.min()):g} to {float(item.max()):g}"
    return text


def collect_images(inputs: Any) -> list[Path | Image.Image]:
    """Return one or several images, given in any common form, as a list.

    Args:
        inputs: A path (of an image or folder), a PIL image, an array, a tensor, or a list of these.
    """
    return collect_inputs(inputs, _memory_images, FORMS)


def _memory_images(item: Any) -> list[Image.Image]:
    """Return an image, or those of an array or tensor, which with four axes is a batch."""
    if isinstance(item, Image.Image):
        return [item]
    if not isinstance(item, torch.Tensor | np.ndarray):
        return []
    values: Any = item
    if isinstance(item, torch.Tensor):
        values = item.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
        values = values if values.ndim < 3 else np.moveaxis(values, -3, -1)
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim not in (3, 4) or values.shape[-1] not in CHANNELS or not values.size:
        return []
    if np.issubdtype(values.dtype, np.floating) and 0 <= values.min() <= values.max() <= 1:
        values = np.round(values.astype(np.float64) * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        return []
    batch = values if values.ndim == 4 else values[None]
    return [
        Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))
        for image in batch
    ]
