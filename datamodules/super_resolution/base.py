"""Base of the datasets for super-resolution: batches of low and high resolution."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import BaseDataModule, Split, check_minimum
from datamodules.files.headers import read_header
from datamodules.files.values import refuse
from datamodules.loading.pixels import is_bytes, scale_bytes
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset
from datamodules.super_resolution.pairs import (
    Middles,
    Pair,
    Patches,
    WholeImages,
    check_low,
    collate,
)
from datamodules.super_resolution.reading import ImagesToEnlarge
from datamodules.super_resolution.reading import collect as collect_images

WINDOW = 11  # pixels of SSIM's window, within borders as wide as the scale
DRAWN = 128  # low-resolution pixels of the sides of images to draw


class SuperResolutionDataModule(BaseDataModule):
    """Base of one layout; subclasses list the images of both splits in ``pairs``.

    Training batches have ``low`` (B, 3, p, p), ``high`` (B, 3, r p, r p) and ``sample_id``.
    Evaluation has whole images; those of different sizes in a batch are a list.

    Args:
        root: Folder of the dataset.
        scale: Factor r.
        patch_size: Side p of the low-resolution patches.
        patches_per_image: Patches that an epoch takes from each image.
        flip: Flip and turn the patches.
        decoded: Folder that gets the training images decoded, 3 bytes per pixel, so that patches
            need no decoding; None to decode an image for each patch.
        batch_size: Patches per training batch and process.
        **options: Options of ``BaseDataModule``.
    """

    unit = "images"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        scale: int = 4,
        patch_size: int = 64,
        patches_per_image: int = 1,
        flip: bool = True,
        decoded: str | Path | None = None,
        batch_size: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.scale = check_minimum("scale", scale, 2)
        self.patch_size = check_minimum("patch_size", patch_size, 1)
        self.patches_per_image = check_minimum("patches_per_image", patches_per_image, 1)
        self.flip = flip
        self.decoded = None if decoded is None else Path(decoded).expanduser()
        self.input_shape = (3, patch_size, patch_size)

    @property
    def head_arguments(self) -> dict[str, Any]:
        """The scale."""
        return {"scale": self.scale}

    def target_facts(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.scale}

    def target_identity(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.scale}

    def predict_only(self, scale: int | None = None) -> None:
        """Set the scale, if a checkpoint has one, and serve prediction alone."""
        self.scale = self.scale if scale is None else scale
        super().predict_only()

    @abstractmethod
    def pairs(self) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """Return the images of training and validation."""

    def build(self) -> dict[Split, SeededDataset]:
        """List the images, and cut those of the training into patches."""
        train, val = self.pairs()
        patches = Patches(
            train, self.scale, self.patch_size, self.patches_per_image, self.flip, self.decoded
        )
        images = WholeImages(val, self.scale)
        return {
            "train": self.seeded(patches, patches.path),
            "val": self.seeded(images, images.path),
        }

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Return a check of the headers of an image's files, and of their sizes."""
        images: Any = self.dataset(split).dataset
        count = len(images.pairs)

        def check(index: int) -> None:
            if index < count:
                self._check(images.pairs[index], split)

        return check

    def _check(self, pair: Pair, split: Split) -> None:
        high = read_header(pair.high)
        sides = high.width // self.scale, high.height // self.scale
        trained = split == "train"
        least = self.scale * self.patch_size if trained else 2 * self.scale + WINDOW
        purpose = f"patches of data.patch_size={self.patch_size}" if trained else "PSNR and SSIM"
        remedy = "lower data.patch_size, or remove the image" if trained else "remove the image"
        rule = (
            f"has {high.width}x{high.height} pixels, but {purpose} take {least} pixels and more at "
            f"data.scale={self.scale}; {remedy}"
        )
        refuse(pair.high, {rule: self.scale * min(sides) < least})
        if pair.low is None:
            return
        low = read_header(pair.low)
        check_low(pair.low, (low.width, low.height), sides, self.scale)

    def normalise(self, batch: Any) -> Any:
        """Return a batch with floats from 0 to 1 in place of bytes."""
        images = batch.keys() & {"low", "high"}
        return {key: _scaled(value) if key in images else value for key, value in batch.items()}

    def preview_batch(self, count: int) -> Any:
        """Return the middles of up to ``count`` images to draw."""
        view = copy.copy(self)
        view._datasets = {
            name: Middles(split_data, DRAWN) for name, split_data in self._datasets.items()
        }
        return super(SuperResolutionDataModule, view).preview_batch(count)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes a batch of samples."""
        return collate

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the dataset of images to enlarge."""
        images = ImagesToEnlarge(collect_images(inputs))
        return TolerantDataset(images, images.name)


def _scaled(images: Any) -> Any:
    if isinstance(images, list):
        return [_scaled(image) for image in images]
    return scale_bytes(images, 255) if is_bytes(images) else images
