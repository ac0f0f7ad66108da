"""Augmentation and preprocessing of single images for classification.

An augmentation makes a training and an evaluation transform. Each turns an RGB image into bytes
(3, size, size), which the datamodule normalises in batches on their device. Random erasing only
draws its rectangle here, as it fills normalised images. Mixup and CutMix work on batches, in the
task.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.auto_augment import AugmentOp, posterize
from torch import Tensor
from torchvision import transforms

from datamodules.base import check_range, check_share
from datamodules.files.resizing import BoundedResize
from datamodules.files.values import check_option

TARGETS = ("LightAugmentation", "PaperAugmentation")

ERASED = "erased"  # key of the rectangles (B, 4) to erase: top, left, height, width
NOISE = "noise_seed"  # key of the seed of the noise in them; without one they become 0


class Prepared(NamedTuple):
    """Result of a transform with more entries of its sample.

    Attributes:
        image: (3, size, size).
        more: Entries by name, such as ``ERASED``.
    """

    image: Tensor
    more: dict[str, Tensor]


Transform = Callable[[Image.Image], Tensor | Prepared]


class Augmentation(Protocol):
    """Factory of a datamodule's transforms.

    A transform returns bytes, or floats that are normalised already.
    """

    @property
    def mean(self) -> Sequence[float]:
        """Mean per channel, subtracted."""
        ...

    @property
    def std(self) -> Sequence[float]:
        """Standard deviation per channel, divided by."""
        ...

    def train(self, size: int) -> Transform:
        """Return the training transform, to (3, size, size)."""
        ...

    def eval(self, size: int) -> Transform:
        """Return the evaluation transform, to (3, size, size)."""
        ...


class ToBytes:
    """Turn an RGB image into a uint8 tensor (3, H, W)."""

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the tensor."""
        return torch.from_numpy(np.stack([np.asarray(band) for band in image.split()]))


class NoiseRectangle:
    """Draw the rectangle that timm's ``RandomErasing`` fills with noise, by the same numbers.

    Args:
        probability: Probability of a rectangle; without one its sides are 0.
    """

    shares = (0.02, 1 / 3)  # of the image's area
    ratios = (0.3, 1 / 0.3)  # height over width

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, image: Tensor) -> Prepared:
        """Return the image with its rectangle and a seed."""
        box = torch.tensor(self._draw(*image.shape[1:]))
        return Prepared(image, {ERASED: box, NOISE: torch.tensor(random.getrandbits(31))})

    def _draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        if random.random() > self.probability:
            return (0, 0, 0, 0)
        low, high = map(math.log, self.ratios)
        for _ in range(10):
            area = random.uniform(*self.shares) * height * width
            ratio = math.exp(random.uniform(low, high))
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if w < width and h < height:
                return random.randint(0, height - h), random.randint(0, width - w), h, w
        return (0, 0, 0, 0)


class MeanRectangle:
    """Draw the rectangle that torchvision's ``RandomErasing`` sets to 0, by the same numbers.

    Args:
        probability: Probability of a rectangle; without one its sides are 0.
    """

    shares = (0.02, 0.33)
    ratios = (0.3, 3.3)

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, image: Tensor) -> Prepared:
        """Return the image with its rectangle."""
        box = [0, 0, 0, 0]
        if torch.rand(1) < self.probability:
            draw: Any = transforms.RandomErasing.get_params
            box_drawn = [*draw(image, self.shares, self.ratios, [0.0])[:4]]
            box = (
                box if box_drawn[2:] == [*image.shape[1:]] else box_drawn
            )  # the whole image: gave up
        return Prepared(image, {ERASED: torch.tensor(box)})


def with_bounded_resize(transform: transforms.Compose) -> transforms.Compose:
    """Return timm's evaluation transform with ``BoundedResize`` before its central crop."""
    first, crop, *rest = transform.transforms
    assert type(first) is transforms.Resize
    assert type(crop) is transforms.CenterCrop
    bounded = BoundedResize(first.size, crop.size, first.interpolation)
    return transforms.Compose([bounded, crop, *rest])


@dataclass(frozen=True)
class PaperAugmentation:
    """The recipe of DeiT, Swin and PoolFormer on ImageNet, by timm's transforms.

    Source: Touvron et al., "Training data-efficient image transformers", 2021, Table 9.

    Attributes:
        auto_augment: timm's name of a policy; None uses ``color_jitter`` instead.
        random_erasing: Probability of filling a rectangle with noise.
        color_jitter: Strength of brightness, contrast and saturation changes; a policy replaces
            them, as in the papers' code.
        flip: Probability of a horizontal flip.
        crop_scale: Smallest and largest share of the image in a random crop.
        crop_ratio: Smallest and largest width over height of a random crop.
        interpolation: Interpolation of resizing, in training and evaluation.
        train_interpolation: Overrides ``interpolation`` in training; "random" draws bilinear or
            bicubic each time.
        crop_pct: Central crop of evaluation as a share of the resized image's side.
        mean: Mean per channel, subtracted.
        std: Standard deviation per channel, divided by.
    """

    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    random_erasing: float = 0.25
    color_jitter: float = 0.4
    flip: float = 0.5
    crop_scale: Sequence[float] = (0.08, 1.0)
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"
    train_interpolation: str | None = None
    crop_pct: float = 0.9
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    std: Sequence[float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        check_augmentation(self)

    def train(self, size: int) -> Transform:
        """Return random resized crop, flip, policy and the rectangle to erase."""
        transform = create_transform(
            input_size=size,
            is_training=True,
            scale=(self.crop_scale[0], self.crop_scale[1]),
            ratio=(self.crop_ratio[0], self.crop_ratio[1]),
            hflip=self.flip,
            color_jitter=self.color_jitter,
            auto_augment=self.auto_augment,
            interpolation=self.train_interpolation or self.interpolation,
            mean=tuple(self.mean),  # fills what a policy moves in
            std=tuple(self.std),
        )
        guard_posterize(transform)
        erased = [NoiseRectangle(self.random_erasing)] if self.random_erasing else []
        return with_bytes(transform, *erased)

    def eval(self, size: int) -> Transform:
        """Return resize and central crop."""
        transform = create_transform(
            input_size=size,
            is_training=False,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
        )
        return with_bounded_resize(with_bytes(transform))


@dataclass(frozen=True)
class LightAugmentation:
    """Gentle changes for small images, which stay readable.

    Attributes:
        shift: Largest shift as a share of the side; the border is filled by reflection.
        degrees: Largest rotation in degrees.
        scale: Smallest and largest scale.
        color_jitter: Strength of brightness, contrast and saturation changes.
        flip: Probability of a horizontal flip; digits need 0, as mirroring spoils them.
        random_erasing: Probability of erasing a rectangle.
        mean: Mean per channel, subtracted.
        std: Standard deviation per channel, divided by.
    """

    shift: float = 0.1
    degrees: float = 10.0
    scale: Sequence[float] = (0.9, 1.1)
    color_jitter: float = 0.2
    flip: float = 0.0
    random_erasing: float = 0.0
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    std: Sequence[float] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        check_augmentation(self)

    def train(self, size: int) -> Transform:
        """Return shift, rotation, scale, flip, colour changes and the rectangle to erase.

        Steps of strength 0 are left out: on small images they would cost as much as training.
        """
        margin = round(self.shift * size)
        scale = (self.scale[0], self.scale[1])
        steps: list[Callable[..., Any]] = [self._resize(size)]
        if margin:
            steps.append(transforms.Pad(margin, padding_mode="reflect"))
        if self.degrees or scale != (1, 1):
            bilinear = transforms.InterpolationMode.BILINEAR
            steps.append(transforms.RandomAffine(self.degrees, scale=scale, interpolation=bilinear))
        if margin:
            steps.append(transforms.RandomCrop(size))
        if self.flip:
            steps.append(transforms.RandomHorizontalFlip(self.flip))
        if self.color_jitter:
            steps.append(transforms.ColorJitter(*[self.color_jitter] * 3))
        steps.append(ToBytes())
        if self.random_erasing:
            steps.append(MeanRectangle(self.random_erasing))
        return transforms.Compose(steps)

    def eval(self, size: int) -> Transform:
        """Return a resize of the whole image to a square."""
        return transforms.Compose([self._resize(size), ToBytes()])

    def _resize(self, size: int) -> transforms.Resize:
        return transforms.Resize((size, size), interpolation=transforms.InterpolationMode.BICUBIC)


def check_augmentation(augmentation: Augmentation) -> None:
    """Check the values of an augmentation.

    Raises:
        ValueError: A value is out of range; the message names the option.
    """
    values = vars(augmentation)
    for name in ("flip", "random_erasing"):
        check_share(f"augmentation.{name}", values[name])
    for name, most in (("color_jitter", math.inf), ("degrees", math.inf), ("shift", 0.499)):
        valid = 0 <= values.get(name, 0) <= most
        check_option(f"augmentation.{name}", values.get(name), valid, f"from 0 to {most}")
    crop = values.get("crop_pct", 1)
    check_option("augmentation.crop_pct", crop, 0 < crop <= 1, "above 0 and at most 1")
    for name in ("scale", "crop_scale", "crop_ratio"):
        if name in values:
            check_range(f"augmentation.{name}", values[name])
    for name in ("mean", "std"):
        numbers = [*values[name]]
        valid = len(numbers) == 3 and (name == "mean" or min(numbers) > 0)
        rule = "three numbers, one per channel, with deviations above 0"
        check_option(f"augmentation.{name}", numbers, valid, rule)
    try:
        augmentation.train(64), augmentation.eval(64)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"data.augmentation={values} cannot be used: {error!r}") from error


def with_bytes(transform: transforms.Compose, *last: NoiseRectangle) -> transforms.Compose:
    """Return a timm transform that ends in bytes and these steps, without its normalisation."""
    (place,) = (
        place
        for place, (first, then) in enumerate(itertools.pairwise(transform.transforms))
        if isinstance(first, transforms.ToTensor) and isinstance(then, transforms.Normalize)
    )
    return transforms.Compose([*transform.transforms[:place], ToBytes(), *last])


def guarded_posterize(image: Image.Image, bits_to_keep: int, **_: object) -> Image.Image:
    """Posterize as timm does, but to black for 0 bits, where Pillow 13 raises an error."""
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return image if bits_to_keep >= 8 else ImageOps.posterize(image, bits_to_keep)


def guard_posterize(transform: Any) -> None:
    """Make a timm transform use ``guarded_posterize``.

    The published recipe asks for 0 bits when it draws a magnitude at the upper end.
    """
    for op in augment_ops(transform):
        if op.aug_fn is posterize:
            op.aug_fn = guarded_posterize


def augment_ops(transform: Any) -> Iterator[AugmentOp]:
    """Yield all single operations within a timm transform."""
    if isinstance(transform, AugmentOp):
        yield transform
        return
    parts = (
        transform
        if isinstance(transform, list | tuple)
        else [
            part
            for name in ("transforms", "ops", "policy")
            for part in getattr(transform, name, None) or ()
        ]
    )
    for part in parts:
        yield from augment_ops(part)
