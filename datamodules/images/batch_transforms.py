"""Augmentation of batches of bytes on their device, by draws of each image's own.

Distributions are those of ``transforms``, whose steps work on single images in loader processes.
Each step rounds to bytes as Pillow does. ``transforms`` describes the options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from datamodules.files.values import check_option
from datamodules.images.transforms import (
    ERASED,
    NOISE,
    Augmentation,
    LightAugmentation,
    MeanRectangle,
    NoiseRectangle,
    PaperAugmentation,
    Prepared,
    ToBytes,
)
from datamodules.loading.resident import Draws

SIDES = "sides"  # key of the height and width (B, 2) of the images on disk
INTERPOLATIONS = {"bicubic": 1.0, "bilinear": 0.0, "random": 0.5}  # the share of bicubic
ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
BRIGHTNESS, CONTRAST = 0, 1  # places among the factors; saturation is the last
Batch = dict[str, Any]
Integers = NDArray[np.int64]


class Squeezed:
    """Transform that resizes a whole image to a square of bytes, with its sides before as entry.

    Args:
        size: Side of the square.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Prepared:
        """Return the image with the entry ``SIDES``."""
        sides = torch.tensor([image.height, image.width])
        squeezed = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return Prepared(ToBytes()(squeezed), {SIDES: sides})


class BatchPaper:
    """``PaperAugmentation`` without a policy: random resized crop, flip, colours and erasing.

    Args:
        made: The augmentation.
        size: Side of the results in pixels.

    Raises:
        ValueError: It has a step for single images.
    """

    def __init__(self, augmentation: PaperAugmentation, size: int) -> None:
        self.made, self.size = augmentation, size
        interpolation = augmentation.train_interpolation or augmentation.interpolation
        rule = (
            "null with data.resident=true, which augments batches: pass "
            "data.augmentation.auto_augment=null, or leave data.resident out"
        )
        policy = augmentation.auto_augment
        check_option("augmentation.auto_augment", policy, policy is None, rule)
        rule = f"one of {', '.join(INTERPOLATIONS)} with data.resident=true"
        name, valid = "augmentation.train_interpolation", interpolation in INTERPOLATIONS
        check_option(name, interpolation, valid, rule)
        self.bicubic = INTERPOLATIONS[interpolation]

    def stored_side(self, native: int | None) -> int:
        """Return the side of the stored images: small ones of one size stay, as crops enlarge."""
        return min(native or self.size, self.size)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Return the batch augmented, with the rectangles to erase."""
        augmentation, images, sides = self.made, batch["image"], batch[SIDES].cpu().numpy()
        boxes = draw_crops(draws, sides, augmentation.crop_scale, augmentation.crop_ratio)
        boxes = boxes * np.tile(np.array(images.shape[2:]) / sides, 2)  # in pixels of the kept ones
        draws_of_batch = boxes, draws.chance(self.bicubic), draws.chance(augmentation.flip)
        images = resized_crops(images, self.size, *tensors(images.device, *draws_of_batch))
        return finished(batch, images, draws, augmentation, NoiseRectangle)


class BatchLight:
    """``LightAugmentation``: shift, rotation, scale, flip, colours and erasing.

    Args:
        made: The augmentation.
        size: Side of the images in pixels.
    """

    def __init__(self, augmentation: LightAugmentation, size: int) -> None:
        self.made, self.size = augmentation, size
        self.margin = round(augmentation.shift * size)

    def stored_side(self, native: int | None) -> int:
        """Return the side of the stored images, which are resized before all other steps."""
        return self.size

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Return the batch augmented, with the rectangles to erase."""
        augmentation, images = self.made, batch["image"]
        corners = np.stack([draws.below(2 * self.margin + 1) for _ in range(2)], 1)
        angles = np.radians(draws.uniform(-augmentation.degrees, augmentation.degrees)[:, 0])
        low, high = augmentation.scale
        scales = draws.uniform(low, high)[:, 0]
        draws_of_batch = corners, draws.chance(augmentation.flip), angles, scales
        corner, flipped, angle, scale = tensors(images.device, *draws_of_batch)
        if augmentation.degrees or (low, high) != (1, 1):
            images = turned_crops(images, self.margin, corner, flipped, angle, scale)
        elif self.margin or augmentation.flip:
            images = shifted(images, corner - self.margin, flipped)
        return finished(batch, images, draws, augmentation, MeanRectangle)


def batch_augmentation(augmentation: Augmentation, size: int) -> BatchPaper | BatchLight:
    """Return the form of an augmentation for batches.

    Raises:
        ValueError: The augmentation works on single images only.
    """
    if isinstance(augmentation, PaperAugmentation):
        return BatchPaper(augmentation, size)
    rule = (
        "PaperAugmentation or LightAugmentation with data.resident=true, as others take single "
        "images; or leave data.resident out"
    )
    check_option(
        "augmentation",
        type(augmentation).__name__,
        isinstance(augmentation, LightAugmentation),
        rule,
    )
    return BatchLight(augmentation, size)  # type: ignore[arg-type]


def finished(
    batch: Batch,
    images: Tensor,
    draws: Draws,
    augmentation: PaperAugmentation | LightAugmentation,
    rectangle: type[NoiseRectangle | MeanRectangle],
) -> Batch:
    """Return the batch with images after changes of colour, and the rectangles to erase."""
    if augmentation.color_jitter:
        factors = draws.uniform(
            max(0.0, 1 - augmentation.color_jitter), 1 + augmentation.color_jitter, 3
        )
        order = np.array(ORDERS)[draws.below(len(ORDERS))]
        images = change_colours(images, *tensors(images.device, factors, order))
    batch = {name: values for name, values in batch.items() if name != SIDES} | {"image": images}
    if augmentation.random_erasing:
        happens = draws.chance(augmentation.random_erasing)
        sides = np.array([images.shape[2:]] * len(images))
        boxes = draw_boxes(draws, sides, rectangle.shares, rectangle.ratios, smaller=True)
        (batch[ERASED],) = tensors(images.device, boxes * happens[:, None])
        if rectangle is NoiseRectangle:
            batch[NOISE] = int(draws.below(2**31).sum())
    return batch


def tensors(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return arrays as tensors on a device, floats as float32."""
    single = (array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays)
    return [torch.from_numpy(array).to(device) for array in single]


def draw_boxes(
    draws: Draws,
    sides: Integers,
    shares: Sequence[float],
    ratios: Sequence[float],
    *,
    smaller: bool,
) -> Integers:
    """Draw boxes as timm and torchvision do: the first of ten that fits, at a random place.

    Args:
        draws: Of the batch.
        sides: Height and width of each image, (B, 2).
        shares: Smallest and largest area of a box, as a share of the image's.
        ratios: Smallest and largest height over width.
        smaller: Boxes are smaller than the image in both directions.

    Returns:
        Top, left, height and width, (B, 4); height and width are 0 if no box fits.
    """
    area = draws.uniform(shares[0], shares[1], 10) * sides.prod(1)[:, None]
    ratio = np.exp(draws.uniform(math.log(ratios[0]), math.log(ratios[1]), 10))
    boxes = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], 2))).astype(np.int64)
    fits = (boxes <= (sides - smaller)[:, None]).all(2)
    box = boxes[np.arange(len(boxes)), fits.argmax(1)] * fits.any(1)[:, None]
    places = [draws.below(room) for room in (sides - box + 1).T]
    return np.concatenate([np.stack(places, 1), box], 1)


def draw_crops(
    draws: Draws, sides: Integers, shares: Sequence[float], ratios: Sequence[float]
) -> Integers:
    """Draw the boxes of random resized crops, (B, 4); see ``draw_boxes``.

    If none fits, it is the largest one in the middle.

    Args:
        draws: Of the batch.
        sides: Height and width of each image, (B, 2).
        shares: Smallest and largest area of a box, as a share of the image's.
        ratios: Smallest and largest width over height.
    """
    low, high = ratios
    boxes = draw_boxes(draws, sides, shares, (1 / high, 1 / low), smaller=False)
    height, width = sides.T
    middle = np.stack(
        [np.minimum(height, np.rint(width / low)), np.minimum(width, np.rint(height * high))], 1
    ).astype(np.int64)
    middle = np.concatenate([(sides - middle) // 2, middle], 1)
    fits = boxes[:, 2:3] > 0
    return np.where(fits, boxes, middle)


def resized_crops(
    images: Tensor, size: int, boxes: Tensor, bicubic: Tensor, flipped: Tensor
) -> Tensor:
    """Crop, enlarge and flip each image, as Pillow does in two passes, to one level of 256.

    Args:
        images: Bytes (B, C, H, W).
        size: Side of the results, at least that of each box.
        boxes: Top, left, height and width, (B, 4).
        bicubic: True for bicubic, False for bilinear interpolation, (B,).
        flipped: True to flip, (B,).
    """
    top, x_min, height, width = boxes.T
    rows = _weights(top, height, images.shape[2], size, bicubic)
    columns = _weights(x_min, width, images.shape[3], size, bicubic)
    columns = torch.where(flipped[:, None, None], columns.flip(1), columns)
    B, C, H, _ = images.shape
    stretched = images.float().flatten(1, 2) @ columns.transpose(1, 2)  # (B, C * H, size)
    stretched = _to_range(stretched.add_(0.5)).view(B, C, H, size).transpose(1, 2).flatten(2)
    resized = _to_range((rows @ stretched).add_(0.5)).to(torch.uint8)  # (B, size, C * size)
    return resized.view(B, size, C, size).transpose(1, 2).contiguous()


def _weights(first: Tensor, length: Tensor, side: int, size: int, bicubic: Tensor) -> Tensor:
    """Return the weights (B, size, side) of an axis; a box's pixels count alone."""
    steps = torch.arange(max(size, side), device=first.device) + 0.5
    centre = first[:, None] + steps[:size] * (length / size)[:, None]
    x = (steps[:side] - centre[..., None]).abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    cubic = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = torch.where(bicubic[:, None, None], cubic, (1 - x).clamp(min=0))
    pixel = steps[:side] - 0.5
    inside = (pixel >= first[:, None].floor()) & (pixel < (first + length)[:, None].ceil())
    weights = weights * inside[:, None]
    return weights / weights.sum(2, keepdim=True)


def _to_range(values: Tensor) -> Tensor:
    return values.floor_().clamp_(0, 255)


def shifted(images: Tensor, corners: Tensor, flipped: Tensor) -> Tensor:
    """Shift images (B, C, H, W) and flip them; the border is filled by reflection.

    Args:
        images: Of any type.
        corners: Row and column of the image that become the first, (B, 2).
        flipped: True to flip, (B,).
    """
    places = []
    for axis, side in enumerate(images.shape[2:]):
        place = (corners[:, axis, None] + torch.arange(side, device=images.device)).abs()
        places.append(torch.where(place < side, place, 2 * (side - 1) - place))
    rows, columns = places
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    image = torch.arange(len(images), device=images.device)[:, None, None]
    sampled = images[image, :, rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
    return sampled.permute(0, 3, 1, 2).contiguous()


def turned_crops(
    images: Tensor, margin: int, corners: Tensor, flipped: Tensor, angle: Tensor, scale: Tensor
) -> Tensor:
    """Pad images by reflection, turn and scale them around their middle, crop and flip them.

    Pixels from outside the padded image are black, as in torchvision's ``RandomAffine``.

    Args:
        images: Bytes (B, C, S, S).
        margin: Pixels of the padding.
        corners: First row and column of the crop in the padded image, (B, 2).
        flipped: True to flip, (B,).
        angle: In radians, clockwise, (B,).
        scale: Size over that before, (B,).
    """
    side = images.shape[2] + 2 * margin
    steps = torch.arange(images.shape[2], device=images.device) + 0.5 - side / 2
    y = (corners[:, 0, None] + steps)[:, :, None]
    x = corners[:, 1, None] + steps
    x = torch.where(flipped[:, None], x.flip(1), x)[:, None, :]
    cos, sin = ((part / scale)[:, None, None] for part in (angle.cos(), angle.sin()))
    grid = torch.stack([cos * x + sin * y, cos * y - sin * x], -1) * (2 / side)  # from -1 to 1
    padded = F.pad(images.float(), (margin,) * 4, mode="reflect")
    sampled = F.grid_sample(padded, grid, padding_mode="border", align_corners=False)
    inside = ((grid >= -1) & (grid < 1)).all(-1)[:, None]
    return (sampled * inside).to(torch.uint8)


def change_colours(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of each image as Pillow does.

    Args:
        images: RGB bytes (B, 3, H, W).
        factors: Of brightness, contrast and saturation, (B, 3).
        order: Order of the three, as places among the factors, (B, 3).
    """
    pixels = images.float()
    for step in range(3):
        kind = order[:, step]
        factor = factors.gather(1, kind[:, None])[:, :, None, None]
        red, green, blue = pixels.split(1, dim=1)
        grey = red * 19595 + green * 38470 + blue * 7471 + 32768  # exact: below 2^24
        grey = grey.div_(65536).floor_()
        mean = (grey.mean((2, 3), keepdim=True) + 0.5).floor_()
        kind = kind[:, None, None, None]
        base = torch.where(kind == CONTRAST, mean, torch.where(kind == BRIGHTNESS, 0.0, grey))
        pixels = _to_range((pixels - base).mul_(factor).add_(base))
    return pixels.to(torch.uint8)
