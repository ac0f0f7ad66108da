"""Class folders, the layout of ImageNet: train/<class>/* and val/<class>/*."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from datamodules.base import Split
from datamodules.files.bands import read_shape
from datamodules.files.class_listing import list_class_images, nfc_names
from datamodules.files.class_order import ClassOrder, sort_classes
from datamodules.files.console import log
from datamodules.files.folders import (
    first_few,
    list_folders,
    list_images,
    require_folder,
    validation_folder,
)
from datamodules.files.headers import read_header
from datamodules.files.values import check_option, refuse
from datamodules.images import band_transforms
from datamodules.images.classification import REQUIRED, ClassificationDataModule
from datamodules.images.shares import check_share
from datamodules.images.token_labels import LabelledTransform, TokenLabelledFiles
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

Found = Mapping[str, Sequence[str]]  # names of images by class
UNLABELLED = "_unlabeled"  # FiftyOne's folder of unlabelled images
FLAT_FOLDER = (
    "it must hold one folder per class; for ImageNet, sort ILSVRC2012_val_*.JPEG by the devkit: "
    "line i of ILSVRC2012_validation_ground_truth.txt is the ILSVRC2012_ID of image i, "
    "which meta.mat maps to the name of its folder"
)


class ImageFolderDataModule(ClassificationDataModule):
    """Images in class folders; the classes are the sorted names of the training folders.

    Layout: ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``, as ImageNet
    (https://www.image-net.org/challenges/LSVRC/2012/).

    Images in sub-folders have the class of the outermost folder. Images are decoded strictly: a
    broken file raises an error that names it, in training too. Hidden files and files without an
    image's ending are skipped and logged.

    Args:
        root: Folder that holds ``train`` and ``val`` (or ``valid``, ``validation``).
        num_classes: Expected number of classes; None accepts any.
        class_order: Order of the classes: "text" sorts folders as torchvision does (1, 10, 2),
            "natural" as timm does (1, 2, 10).
        train_share: Share of each class's training images to use, the first by name.
        bands: Number of bands of each file, or a list of the bands to use, from 0 on: images of any
            depth with 1 to 12 bands. None reads 8-bit RGB.
        band_mean: Mean per band, subtracted; None computes it from the training images.
        band_std: Standard deviation per band, divided by; None computes it likewise.
        **options: Options of ``ClassificationDataModule``, such as ``image_size``.
    """

    layout = "train/<class>/*.jpg and val/<class>/*.jpg"
    example = "data=imagenet data.root=/data/imagenet"
    takes_maps = True

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_classes: int | None = None,
        class_order: ClassOrder = "text",
        train_share: float = 1.0,
        bands: int | Sequence[int] | None = None,
        band_mean: Sequence[float] | None = None,
        band_std: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.set_bands(bands, band_mean, band_std)
        if self.bands is not None:
            band_transforms.check_bands(self.augmentation)
            for name in ("token_labels", "resident"):
                value = getattr(self, name)
                check_option(name, value, not value, "left out with data.bands, as it is for RGB")
        self.expected_classes = num_classes
        self.class_order = class_order
        self.train_share = check_share(train_share)

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and list their images."""
        train, val = self.folder / "train", self.validation()
        for folder in (train, val):
            require_folder(folder, f"an image folder has {self.layout}")
        self.class_names = tuple(sort_classes(class_folders(train), self.class_order))
        self.check_count(train, "class folders")
        strays = sorted(set(class_folders(val)) - set(self.class_names))
        rule = f"has class folders that {train} lacks"
        refuse(val, {rule: strays})
        training = self._list_classes(train, self.train_share)
        return self.datasets(train, training, val, self._list_classes(val))

    def datasets(self, train: Path, training: Found, val: Path, validating: Found) -> Any:
        """Return the datasets of listed images, with the statistics of the bands from training."""
        self.measure_bands([str(train / image) for files in training.values() for image in files])
        return {
            "train": self.labelled(train, training, self.train_transform()),
            "val": self.labelled(val, validating, self._eval),
        }

    def validation(self) -> Path:
        """Return the folder of the validation images."""
        return validation_folder(self.folder)

    def train_transform(self) -> Any:
        """Return the transform of training images, and of their label maps if there are any."""
        if self.token_labels in (None, REQUIRED):
            return super().train_transform()
        return LabelledTransform(
            self.augmentation, self.image_size, self.token_labels, self.token_boxes
        )

    def files(
        self, root: Path, names: Sequence[str], labels: Sequence[int], transform: Transform
    ) -> SeededDataset:
        """Return a seeded dataset of labelled image files, with label maps if there are any."""
        if not isinstance(transform, LabelledTransform):
            return super().files(root, names, labels, transform)
        images = TokenLabelledFiles(root, names, labels, transform, self.class_names)
        return self.seeded(images, images.path)

    def check_files(self, seconds: float = 60.0) -> None:
        """Check all files before training; label maps come first."""
        images = self.dataset("train").dataset
        if isinstance(images, TokenLabelledFiles):
            images.check()
        super().check_files(seconds)

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Return a check of an image's header and end."""
        describe, bands = self.dataset(split).describe, self.bands

        def check(index: int) -> None:
            if bands is None:
                read_header(describe(index))
            else:
                read_shape(describe(index), bands)

        return check

    def _list_classes(self, folder: Path, share: float = 1.0) -> Found:
        files = list_class_images(folder, self.class_names, self.suffixes)
        bare = [name for name, images in files.items() if not images]
        is_needed = folder.name == "train" or len(bare) == len(files)
        rule = "has class folders without images (fill or remove them)"
        refuse(folder, {rule: bare if is_needed else []})
        if bare:
            rank_zero_warn(
                f"{folder} lacks images of {first_few(bare)}; accuracy ignores these classes"
            )
        return first_of_each(files, share)

    def labelled(self, folder: Path, images_by_class: Found, transform: Any) -> SeededDataset:
        """Return the dataset of all classes' images, given in label order."""
        names = [image for images in images_by_class.values() for image in images]
        labels = [label for label, images in enumerate(images_by_class.values()) for _ in images]
        return self.files(folder, names, labels, transform)


def first_of_each(images_by_class: Found, share: float) -> dict[str, Sequence[str]]:
    """Return a share of each class's images, the first by name, at least one."""
    return {
        name: images[: math.ceil(share * len(images))] for name, images in images_by_class.items()
    }


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders, in NFC.

    Raises:
        ValueError: Class folders are missing, or two have the same name in NFC and NFD.
    """
    names = list_folders(folder)
    if UNLABELLED in names and len(names) > 1:
        names.remove(UNLABELLED)
        log(f"{folder / UNLABELLED} is skipped: FiftyOne stores images without a label there")
    if names:
        return nfc_names(folder, names)
    images = list_images(folder)
    images_found = f"holds images but no class folders ({first_few(images, 2)})"
    faults = {
        f"{images_found}; {FLAT_FOLDER}": bool(images),
        f"has no class folders; {FLAT_FOLDER}": True,
    }
    refuse(folder, faults)
    return []
