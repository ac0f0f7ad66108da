"""Any folder of classes; draws a validation split if the folder lacks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.base import check_minimum
from datamodules.files.class_listing import list_class_images
from datamodules.files.class_order import sort_classes
from datamodules.files.console import log
from datamodules.files.folders import VALIDATION, first_few, list_folders, require_folder
from datamodules.images.image_folder import ImageFolderDataModule, class_folders, first_of_each
from datamodules.layouts.splits import TEST, SplitOptions, draw_names
from datamodules.loading.sampling import SeededDataset

MULTI_LABEL = "_classes.csv"  # Roboflow's labels of its multi-label export

SPLITS = {"train", "training", *VALIDATION, "test", "testing"}  # other programs' folder names


class ClassFoldersDataModule(ImageFolderDataModule):
    """Class folders directly in ``root`` or in ``root/train``; validation is drawn from them.

    Layout: ``<class>/*.jpg``, or ``train/<class>/*.jpg`` with an optional ``val/<class>/*.jpg``.

    A folder ``val`` (or ``valid``, ``validation``) beside ``train`` replaces the drawn split. The
    draw depends on the images' names and ``split_seed`` alone, so it is the same in every run.
    Images that are added later leave nearly all others on their side.

    Args:
        root: The folder.
        val_share: Share of each class's images to validate with; at least one image per class
            validates and at least one trains.
        split_seed: Seed of the draw.
        val_split: Name of the validation folder beside ``train``; None for the usual names.
        **options: Options of ``ImageFolderDataModule``.

    Raises:
        ValueError: The share is outside (0, 1).
    """

    layout = "<class>/*.jpg, or train/<class>/*.jpg with or without val/<class>/*.jpg"
    example = "data=folder data.root=/data/pets data.val_share=0.1"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        val_share: float = 0.1,
        split_seed: int = 0,
        val_split: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        if not 0 < val_share < 1:
            raise ValueError(
                f"data.val_share must be between 0 and 1, such as 0.1, got {val_share}"
            )
        self.val_share = val_share
        self.split_seed = check_minimum("split_seed", split_seed, 0)
        self.val_split = val_split

    def build(self) -> dict[Any, SeededDataset]:
        """List the images and divide them, unless folders divide them already."""
        train = self.folder / "train"
        for place in (train, self.folder):
            if (place / MULTI_LABEL).is_file():
                raise ValueError(
                    f"{place / MULTI_LABEL} lists several labels per image (Roboflow's multi-label "
                    "export), which is not supported; export class folders ('Folder Structure')"
                )
        if train.is_dir() and self.validation().is_dir():
            for name in list_folders(self.folder):
                if name.lower() in TEST and name != self.val_split:
                    log(f"{self.folder / name} is left out (data.val_split={name} validates it)")
            return super().build()
        folder = train if train.is_dir() else self.folder
        if not train.is_dir():
            _reject_splits(folder)
        self.class_names = tuple(sort_classes(class_folders(folder), self.class_order))
        self.check_count(folder, "class folders")
        images = list_class_images(folder, self.class_names, self.suffixes)
        few = [name for name, found in images.items() if len(found) < 2]
        if few:
            raise ValueError(
                f"class folders need two images, one to train and one to validate with; in "
                f"{folder} these have fewer: {first_few(few)}; fill or remove them"
            )
        options = SplitOptions(share=self.val_share, seed=self.split_seed)
        validating = {name: draw_names(found, options) for name, found in images.items()}
        chosen = {
            "train": {name: sorted(set(images[name]) - validating[name]) for name in images},
            "val": {name: sorted(validating[name]) for name in images},
        }
        counts = {split: sum(map(len, parts.values())) for split, parts in chosen.items()}
        log(
            f"{folder} has only training images: {counts['val']} of its {sum(counts.values())} "
            f"images validate (data.val_share={self.val_share}, data.split_seed={self.split_seed})"
            f"{_unused(self.folder) if train.is_dir() else ''}"
        )
        training = first_of_each(chosen["train"], self.train_share)
        return self.datasets(folder, training, folder, chosen["val"])

    def validation(self) -> Path:
        """Return the folder of the validation images."""
        if self.val_split is None:
            return super().validation()
        folder = self.folder / self.val_split
        require_folder(folder, f"pass data.val_split=<a folder of {self.folder}>")
        return folder


def _reject_splits(folder: Path) -> None:
    """Raise an error if folders of splits would be read as classes."""
    splits = [
        name
        for name in list_folders(folder)
        if name.lower() in SPLITS and list_folders(folder / name)
    ]
    if splits:
        raise ValueError(
            f"{folder} has class folders in {first_few(splits)}, which are names of splits; "
            "rename the folders to train and val"
        )


def _unused(folder: Path) -> str:
    """Return the message's part about unused folders beside ``train``."""
    others = [name for name in list_folders(folder) if name != "train"]
    return f"; not used: {first_few(others)}" if others else ""
