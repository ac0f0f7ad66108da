"""Resizing of images before a central crop, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image
from torchvision import transforms

from datamodules.files.decoding import MAX_PIXELS


class BoundedResize(transforms.Resize):  # type: ignore[misc]  # torchvision is untyped
    """Torchvision's ``Resize`` of the shorter side before a central crop, in bounded memory.

    For a thin image that would exceed ``MAX_PIXELS`` only the crop is computed. All other images
    are resized as in torchvision.

    Args:
        size: Shorter side, at least as long as the crop's sides.
        crop: Height and width of the crop.
        interpolation: Interpolation of resizing.
    """

    def __init__(
        self, size: int, crop: Sequence[int], interpolation: transforms.InterpolationMode
    ) -> None:
        super().__init__(size, interpolation)
        self.crop = (crop[1], crop[0])

    def forward(self, image: Image.Image) -> Image.Image:
        """Resize an image."""
        shortest = min(image.size)
        resized = [int(self.size * side / shortest) for side in image.size]
        if math.prod(resized) <= MAX_PIXELS:
            return super().forward(image)
        box = []
        for side_before, side_resized, side_of_crop in zip(
            image.size, resized, self.crop, strict=True
        ):
            first = round((side_resized - side_of_crop) / 2)
            box.append(
                (
                    first * side_before / side_resized,
                    (first + side_of_crop) * side_before / side_resized,
                )
            )
        (x_min, right), (top, bottom) = box
        resampling = Image.Resampling[self.interpolation.name]
        return image.resize(self.crop, resampling, (x_min, top, right, bottom))
