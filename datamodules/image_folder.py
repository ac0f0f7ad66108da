"""Class folders, the layout of ImageNet: train/<class>/* and val/<class>/*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from datamodules.classification import ClassificationDataModule
from datamodules.files import first_few, list_folders, list_images, require_folder
from datamodules.sampling import SeededDataset
from datamodules.transforms import Augmentation

FLAT_FOLDER = (
    "it must hold one folder per class; for ImageNet, sort ILSVRC2012_val_*.JPEG by the devkit: "
    "line i of ILSVRC2012_validation_ground_truth.txt is the ILSVRC2012_ID of image i, "
    "which meta.mat maps to the name of its folder"
)


class ImageFolderDataModule(ClassificationDataModule):
    """Images in class folders; the classes are the sorted names of the training folders.

    Images are decoded strictly: a broken file is an error that names it, in training too. Hidden
    files and files without an image's ending are ignored.

    Args:
        root: Folder that holds ``train`` and ``val``.
        image_size: Side of the images.
        num_classes: Expected number of classes; None accepts any.
        augmentation: Makes the transforms; None means the ImageNet recipe of the papers.
        batch_size: Samples per training batch and process.
        eval_batch_size: The same for evaluation; None means ``batch_size``.
        num_workers: Loader processes per training process.
        seed: Decides order and augmentation.
        predict_path: Image or folder to predict; None means the validation images.
    """

    layout = "train/<class>/*.jpg and val/<class>/*.jpg"
    example = "data=imagenet data.root=/data/imagenet"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        image_size: int = 224,
        num_classes: int | None = None,
        augmentation: Augmentation | None = None,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        seed: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__(
            root,
            image_size=image_size,
            augmentation=augmentation,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            predict_path=predict_path,
        )
        self.expected_classes = num_classes

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and list their images."""
        train, val = self.folder / "train", self.folder / "val"
        for folder in (train, val):
            require_folder(folder, f"an image folder has {self.layout}")
        self.class_names = tuple(class_folders(train))
        if self.expected_classes not in (None, len(self.class_names)):
            raise ValueError(
                f"{train} has {len(self.class_names)} class folders but data.num_classes is "
                f"{self.expected_classes}; correct one of them"
            )
        strays = sorted(set(class_folders(val)) - set(self.class_names))
        if strays:
            raise ValueError(f"{val} has class folders that {train} lacks: {first_few(strays)}")
        make = self.augmentation
        return {
            "train": self._split(train, make.train(self.image_size)),
            "val": self._split(val, make.eval(self.image_size)),
        }

    def _split(self, folder: Path, transform: Any) -> SeededDataset:
        found = {
            name: list_images(folder / name) if (folder / name).is_dir() else []
            for name in self.class_names
        }
        empty = [name for name, images in found.items() if not images]
        if empty and (folder.name == "train" or len(empty) == len(found)):
            raise ValueError(
                f"class folders without images in {folder}: {first_few(empty)}; fill or remove them"
            )
        if empty:
            rank_zero_warn(
                f"{folder} has no images of {first_few(empty)}; "
                "its accuracy says nothing about them"
            )
        names = [f"{name}/{image}" for name, images in found.items() for image in images]
        labels = [label for label, images in enumerate(found.values()) for _ in images]
        return self.files(folder, names, labels, transform)


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders."""
    names = list_folders(folder)
    if names:
        return names
    images = list_images(folder)
    if images:
        raise ValueError(
            f"{folder} holds images but no class folders ({first_few(images, 2)}); {FLAT_FOLDER}"
        )
    raise ValueError(f"no class folders in {folder}; {FLAT_FOLDER}")
