"""Sample images: small generated datasets in the real formats, read by the real datamodules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.base import check_minimum
from datamodules.images.cifar100 import CIFAR100DataModule
from datamodules.images.class_folders import ClassFoldersDataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.transforms import LightAugmentation
from datamodules.sample.base import SampleDataModule
from datamodules.sample.digits import NUM_TRAIN_DIGITS, SampleSplit
from datamodules.sample.drawn_images import (
    PAIR_SIDE,
    TABLE,
    write_cifar100,
    write_image_folder,
    write_label_table,
)


class SampleClassification(SampleDataModule, ImageFolderDataModule):
    """Single digits on photographs, 10 classes in class folders.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        train_copies: Training images per digit, of 1,400 training digits.
        val_copies: Validation images per digit, of 397 validation digits.
        digits_per_class: Most digits to use per class and split.
        picture_size: Side of an image in pixels.
        sample_seed: Seed of the generated data.
        options: Options of ``ImageFolderDataModule``; defaults are ``image_size=picture_size`` and
            a light augmentation.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        train_copies: int = 3,
        val_copies: int = 1,
        digits_per_class: int = 200,
        picture_size: int = 64,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {
            "image_size": picture_size,
            "augmentation": LightAugmentation(),
            "batch_size": 64,
        }
        super().__init__(None, **{**defaults, **options})
        counts: dict[SampleSplit, int] = {"train": train_copies, "val": val_copies}
        self.digits_per_class = check_minimum("digits_per_class", digits_per_class, 1)
        self._describe(
            f"classification-{digits_per_class}",
            root,
            picture_size,
            counts,
            sample_seed,
            min(10 * digits_per_class, NUM_TRAIN_DIGITS),
        )

    def write(self, folder: Path) -> None:
        """Write class folders of JPEGs."""
        write_image_folder(
            folder, self.counts, self.picture_size, self.sample_seed, self.digits_per_class
        )


class SampleMultiLabel(SampleDataModule, ClassFoldersDataModule):
    """Photographs with two digits each; the labels are the digits, in a csv file.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Training images.
        num_val: Validation images.
        sample_seed: Seed of the generated data.
        options: Options of ``ClassFoldersDataModule``; defaults are ``image_size=64`` and a light
            augmentation.
    """

    example = "data=folder data.root=/data/photos data.labels=labels.csv"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 3000,
        num_val: int = 500,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {"image_size": 64, "augmentation": LightAugmentation(), "batch_size": 64}
        super().__init__(None, **{**defaults, **options, "labels": TABLE})
        counts: dict[SampleSplit, int] = {"train": num_train, "val": num_val}
        self._describe("multi_label", root, PAIR_SIDE, counts, sample_seed)

    def write(self, folder: Path) -> None:
        """Write images and their csv file."""
        write_label_table(folder, self.counts, self.sample_seed)


class SampleTransfer(SampleDataModule, CIFAR100DataModule):
    """Numbers from 00 to 99 on photographs, 100 classes in CIFAR-100's format.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        train_per_class: Training images per number.
        val_per_class: Test images per number.
        sample_seed: Seed of the generated data.
        options: Options of ``CIFAR100DataModule``; defaults are ``image_size=64`` and a light
            augmentation.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        train_per_class: int = 100,
        val_per_class: int = 20,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {"image_size": 64, "augmentation": LightAugmentation(), "batch_size": 64}
        super().__init__(None, **{**defaults, **options})
        counts: dict[SampleSplit, int] = {"train": train_per_class, "val": val_per_class}
        self._describe("transfer", root, 32, counts, sample_seed, 100)

    def write(self, folder: Path) -> None:
        """Write the pickles ``train``, ``test`` and ``meta``."""
        write_cifar100(folder, self.counts, self.sample_seed)
