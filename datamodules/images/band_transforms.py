"""Transforms of images of bands, by the options of the augmentations for RGB images.

Both turn an array (H, W, C) in the units of the files into a normalised tensor (C, size, size).
Crops, flips, shifts, rotations and erasing work as for RGB. ``color_jitter`` changes brightness and
contrast, by one factor for all bands. Policies (``auto_augment``) are for 8-bit RGB only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop

from datamodules.files.bands import Statistics
from datamodules.files.decoding import MAX_PIXELS
from datamodules.files.values import check_option
from datamodules.images.transforms import Augmentation, LightAugmentation, PaperAugmentation

Step = Callable[[Any], Any]
make_erasing: Any = RandomErasing  # timm's classes are untyped


class ToTensor:
    """Turn an array (H, W, C) into a tensor (C, H, W)."""

    def __call__(self, values: Any) -> Tensor:
        """Return the tensor."""
        return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


class Jitter(nn.Module):
    """Random brightness and contrast of all bands together.

    Args:
        strength: Factors are drawn from 1 - strength to 1 + strength, at least 0.
    """

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.low, self.high = max(0.0, 1 - strength), 1 + strength

    def forward(self, bands: Tensor) -> Tensor:
        """Return bands of another brightness and contrast, with the mean of each band as centre."""
        brightness, contrast = torch.empty(2).uniform_(self.low, self.high).tolist()
        bands = bands * brightness
        mean = bands.mean(dim=(1, 2), keepdim=True)
        return mean + contrast * (bands - mean)


class BoundedResize(transforms.Resize):  # type: ignore[misc]  # torchvision is untyped
    """Torchvision's resize of the shorter side before a central crop, in bounded memory.

    The middle of a thin image that would exceed ``MAX_PIXELS`` is cut out first.
    """

    def forward(self, bands: Tensor) -> Tensor:
        """Return bands with a shorter side of ``size``."""
        side = min(bands.shape[1:])
        if self.size**2 * max(bands.shape[1:]) > MAX_PIXELS * side:
            bands = center_crop(bands, [side, side])
        resized: Tensor = super().forward(bands)
        return resized


def train_transform(augmentation: Augmentation, size: int, statistics: Statistics) -> Step:
    """Return the training transform of bands.

    Args:
        augmentation: One that ``check_bands`` accepts.
        size: Side of the images.
        statistics: Of the bands.
    """
    if isinstance(augmentation, PaperAugmentation):
        return _composed(_paper_steps(augmentation, size), statistics, _paper_erasing(augmentation))
    assert isinstance(augmentation, LightAugmentation)
    return _composed(_light_steps(augmentation, size), statistics, _light_erasing(augmentation))


def eval_transform(augmentation: Augmentation, size: int, statistics: Statistics) -> Step:
    """Return the evaluation transform of bands; see ``train_transform``."""
    if isinstance(augmentation, PaperAugmentation):
        resize = BoundedResize(int(size / augmentation.crop_pct), _mode(augmentation.interpolation))
        return _composed([resize, transforms.CenterCrop(size)], statistics)
    return _composed([_squeeze(size)], statistics)


def check_bands(augmentation: Augmentation) -> None:
    """Refuse an augmentation of 8-bit RGB, or one with such a policy."""
    policy = getattr(augmentation, "auto_augment", None)
    fits = isinstance(augmentation, PaperAugmentation | LightAugmentation) and policy is None
    rule = "PaperAugmentation with data.augmentation.auto_augment=null, or LightAugmentation"
    check_option("augmentation", augmentation, fits, f"{rule}, with data.bands")


def _paper_steps(augmentation: PaperAugmentation, size: int) -> list[Step]:
    scale, ratio = tuple(augmentation.crop_scale), tuple(augmentation.crop_ratio)
    name = augmentation.train_interpolation or augmentation.interpolation
    names = ("bilinear", "bicubic") if name == "random" else (name,)
    crops = [transforms.RandomResizedCrop(size, scale, ratio, _mode(kind)) for kind in names]
    steps: list[Step] = [transforms.RandomChoice(crops) if len(crops) > 1 else crops[0]]
    return [*steps, *_flip(augmentation.flip), *_jitter(augmentation.color_jitter)]


def _light_steps(augmentation: LightAugmentation, size: int) -> list[Step]:
    margin, scale = round(augmentation.shift * size), (augmentation.scale[0], augmentation.scale[1])
    steps: list[Step] = [_squeeze(size)]
    if margin:
        steps.append(transforms.Pad(margin, padding_mode="reflect"))
    if augmentation.degrees or scale != (1, 1):
        bilinear = InterpolationMode.BILINEAR
        steps.append(
            transforms.RandomAffine(augmentation.degrees, scale=scale, interpolation=bilinear)
        )
    if margin:
        steps.append(transforms.RandomCrop(size))
    return [*steps, *_flip(augmentation.flip), *_jitter(augmentation.color_jitter)]


def _squeeze(size: int) -> Step:
    step: Step = transforms.Resize((size, size), InterpolationMode.BICUBIC)
    return step


def _flip(probability: float) -> list[Step]:
    return [transforms.RandomHorizontalFlip(probability)] if probability else []


def _jitter(strength: float) -> list[Step]:
    return [Jitter(strength)] if strength else []


def _paper_erasing(augmentation: PaperAugmentation) -> list[Step]:
    share = augmentation.random_erasing
    return [make_erasing(share, mode="pixel", device="cpu")] if share else []


def _light_erasing(augmentation: LightAugmentation) -> list[Step]:
    return (
        [transforms.RandomErasing(augmentation.random_erasing)]
        if augmentation.random_erasing
        else []
    )


def _composed(steps: list[Step], statistics: Statistics, last: list[Step] | None = None) -> Step:
    normalise = transforms.Normalize([*statistics.mean], [*statistics.std])
    composed: Step = transforms.Compose([ToTensor(), *steps, normalise, *(last or ())])
    return composed


def _mode(name: str) -> InterpolationMode:
    """Return torchvision's interpolation of a name of timm's."""
    return InterpolationMode(name)
