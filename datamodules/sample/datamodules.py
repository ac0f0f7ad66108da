"""Sample data: small sets made here, in the real formats, read by the real datamodules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.base import BaseDataModule, at_least
from datamodules.dense.ade20k import ADE20KDataModule
from datamodules.dense.coco import CocoDataModule
from datamodules.files.cache import cache_root, sample_folder
from datamodules.files.console import say
from datamodules.images.cifar100 import CIFAR100DataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.transforms import LightAugmentation
from datamodules.loading.memory import in_bytes
from datamodules.sample.digits import NUM_TRAIN_DIGITS, SampleSplit
from datamodules.sample.drawn_images import write_cifar100, write_image_folder
from datamodules.sample.scenes import BACKGROUND, write_ade20k, write_coco

MOST_BYTES = 10_000_000_000  # of sample pictures before compression


class SampleDataModule(BaseDataModule):
    """Generates its files before its other parent class reads them.

    Attributes:
        base: Folder of all sample sets.
        set_name: Folder of this set, named by all that its bytes depend on.
    """

    base: Path
    set_name: str

    def write(self, folder: Path) -> None:
        """Write the set into an empty folder."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Generate the set unless it exists, and say that this is no real data."""
        if self._datasets:  # of images to predict, for which it is not needed
            return
        folder = sample_folder(self.base, self.set_name, self.write)
        if self.root != folder:
            self.root = folder
            say(f"Sample data in {folder}; for a real dataset pass {self.example}")

    def setup(self, stage: str | None = None) -> None:
        """Generate the set unless it exists, check it and build the datasets."""
        self.prepare_data()
        super().setup(stage)

    def _describe(
        self,
        kind: str,
        root: str | Path | None,
        size: int,
        counts: dict[SampleSplit, int],
        seed: int,
        pictures_per_count: int = 1,
    ) -> None:
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.counts = {
            split: at_least(f"the size of {split}", count, 1) for split, count in counts.items()
        }
        self.picture_size = at_least("the picture size", size, 32)
        self.sample_seed = at_least("sample_seed", seed, 0)
        pictures = sum(counts.values()) * pictures_per_count
        refuse_many(pictures, size)
        self.set_name = f"{kind}-{size}px-{counts['train']}-{counts['val']}-seed{seed}"


def refuse_many(pictures: int, side: int) -> None:
    """Raise an error for sample data that would take hours and fill the disk.

    Raises:
        ValueError: Names the size of all pictures.
    """
    size = 3 * pictures * side**2
    if size > MOST_BYTES:
        raise ValueError(
            f"{pictures:,} sample pictures of {side}x{side} pixels take {in_bytes(size)}, and "
            f"{in_bytes(MOST_BYTES)} are the most; make fewer or smaller ones"
        )


class SampleClassification(SampleDataModule, ImageFolderDataModule):
    """Single digits on photographs, 10 classes in class folders.

    Args:
        root: Folder of all sample sets; None means ``$MIXERLAB_CACHE`` or ``~/.cache/mixerlab``.
        train_copies: Training pictures of each of the 1,400 training digits.
        val_copies: Validation pictures of each of the 397 validation digits.
        digits_per_class: Use at most this many digits of each class and split.
        picture_size: Side of a picture in pixels.
        sample_seed: Decides the generated data.
        options: Of ``ImageFolderDataModule``; ``image_size`` is the picture's unless given, the
            augmentation a light one.
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
        self.digits_per_class = at_least("digits_per_class", digits_per_class, 1)
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


class SampleTransfer(SampleDataModule, CIFAR100DataModule):
    """Numbers from 00 to 99 on photographs, 100 classes in CIFAR-100's format.

    Args:
        root: Folder of all sample sets; None means ``$MIXERLAB_CACHE`` or ``~/.cache/mixerlab``.
        train_per_class: Training pictures of each number.
        val_per_class: Test pictures of each number.
        sample_seed: Decides the generated data.
        options: Of ``CIFAR100DataModule``; ``image_size`` is 64 unless given, the augmentation a
            light one.
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


class SampleDetection(SampleDataModule, CocoDataModule):
    """Scenes of several digits with boxes and masks, 10 classes in COCO's format.

    Args:
        root: Folder of all sample sets; None means ``$MIXERLAB_CACHE`` or ``~/.cache/mixerlab``.
        num_train: Training scenes.
        num_val: Validation scenes.
        scene_size: Side of a scene in pixels.
        sample_seed: Decides the generated data.
        options: Of ``CocoDataModule``; ``scale`` is the scene's and ``flip`` 0 unless given.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 800,
        num_val: int = 100,
        scene_size: int = 160,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **{"scale": scene_size, "flip": 0.0, "batch_size": 4, **options})
        self._describe(
            "detection", root, scene_size, {"train": num_train, "val": num_val}, sample_seed
        )

    def write(self, folder: Path) -> None:
        """Write JPEGs and one json per split."""
        write_coco(folder, self.counts, self.picture_size, self.sample_seed)


class SampleSegmentation(SampleDataModule, ADE20KDataModule):
    """The scenes of ``SampleDetection``, 11 classes (photo and digits) in ADE20K's layout.

    Args:
        root: Folder of all sample sets; None means ``$MIXERLAB_CACHE`` or ``~/.cache/mixerlab``.
        num_train: Training scenes.
        num_val: Validation scenes.
        scene_size: Side of a scene in pixels.
        sample_seed: Decides the generated data.
        options: Of ``ADE20KDataModule``; ``scale`` and ``crop_size`` are the scene's, and the
            augmentation is lighter, unless given.
    """

    background = BACKGROUND

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 800,
        num_val: int = 100,
        scene_size: int = 160,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {
            "scale": scene_size,
            "crop_size": scene_size,
            "scale_jitter": (0.8, 1.25),
            # The photo fills most of every crop.
            "cat_max_ratio": 1.0,
            "flip": 0.0,
            "photometric": False,
        }
        super().__init__(None, **{**defaults, **options})
        self._describe(
            "segmentation", root, scene_size, {"train": num_train, "val": num_val}, sample_seed
        )

    def write(self, folder: Path) -> None:
        """Write JPEGs, masks and the list of classes."""
        write_ade20k(folder, self.counts, self.picture_size, self.sample_seed)
