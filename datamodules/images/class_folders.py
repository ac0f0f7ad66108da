"""Any folder of classes; draws a validation split if the folder lacks one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.annotation_formats.splits import TEST, SplitOptions, draw_names
from datamodules.base import Split, check_minimum
from datamodules.files.class_listing import list_class_images
from datamodules.files.class_order import sort_classes
from datamodules.files.console import log
from datamodules.files.folders import VALIDATION, first_few, list_folders, require_folder
from datamodules.files.values import check_option, refuse
from datamodules.images.image_folder import ImageFolderDataModule, class_folders, first_of_each
from datamodules.images.label_table import (
    LabelledFiles,
    LabelTable,
    divide,
    find_tables,
    read_label_table,
)
from datamodules.images.label_table import notices as table_notices
from datamodules.loading.sampling import SeededDataset

MULTI_LABEL = "_classes.csv"  # Roboflow's labels of its multi-label export

SPLITS = {"train", "training", *VALIDATION, "test", "testing"}  # other programs' folder names


class ClassFoldersDataModule(ImageFolderDataModule):
    """Class folders directly in ``root`` or in ``root/train``; validation is drawn from them.

    Layout: ``<class>/*.jpg``, or ``train/<class>/*.jpg`` with an optional ``val/<class>/*.jpg``.

    A folder ``val`` (or ``valid``, ``validation``) beside ``train`` replaces the drawn split. The
    draw depends on the images' names and ``split_seed`` alone, so it is the same in every run.
    Images that are added later leave nearly all others on their side.

    With ``labels`` the images may lie anywhere in ``root`` and have any number of labels each, for
    ``task=multi_label``; see ``label_table``.

    Args:
        root: The folder.
        val_share: Share of each class's images to validate with; at least one image per class
            validates and at least one trains.
        split_seed: Seed of the draw.
        val_split: Name of the validation folder beside ``train``; None for the usual names.
        labels: A csv file in ``root``, or in its folders ``train`` and ``val``: the image, then a
            column of labels such as "cat;dog", or a column of 0 and 1 per class. None: folders.
        label_separator: Separator in a column of labels; None recognises ; | and commas.
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
        labels: str | None = None,
        label_separator: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        rule = "between 0 and 1, such as 0.1"
        self.val_share = check_option("val_share", val_share, 0 < val_share < 1, rule)
        self.split_seed = check_minimum("split_seed", split_seed, 0)
        self.val_split = val_split
        self.labels, self.label_separator = labels, label_separator
        self._tables: dict[str, LabelTable] = {}
        is_alone = labels is None or self.token_labels is None
        check_option("labels", labels, is_alone, "null with data.token_labels, for class folders")

    def build(self) -> dict[Any, SeededDataset]:
        """List the images and divide them, unless folders divide them already."""
        if self.labels is not None:
            return self._build_from_table(self.labels)
        train = self.folder / "train"
        for place in (train, self.folder):
            rule = (
                "lists several labels per image (Roboflow's multi-label export); pass "
                f"task=multi_label data.labels={MULTI_LABEL}, or export class folders ('Folder "
                "Structure')"
            )
            refuse(place / MULTI_LABEL, {rule: (place / MULTI_LABEL).is_file()})
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
        few = [name for name, files in images.items() if len(files) < 2]
        rule = "has class folders of fewer than two images, one to train and one to validate with"
        refuse(folder, {f"{rule} (fill or remove them)": few})
        options = SplitOptions(share=self.val_share, seed=self.split_seed)
        validating = {name: draw_names(files, options) for name, files in images.items()}
        divided = {
            "train": {name: sorted(set(images[name]) - validating[name]) for name in images},
            "val": {name: sorted(validating[name]) for name in images},
        }
        counts = {split: sum(map(len, parts.values())) for split, parts in divided.items()}
        log(
            f"{folder} has only training images: {counts['val']} of its {sum(counts.values())} "
            f"images validate (data.val_share={self.val_share}, data.split_seed={self.split_seed})"
            f"{_unused(self.folder) if train.is_dir() else ''}"
        )
        training = first_of_each(divided["train"], self.train_share)
        return self.datasets(folder, training, folder, divided["val"])

    def _build_from_table(self, name: str) -> dict[Any, SeededDataset]:
        """Read the images and labels of csv files."""
        options: dict[str, Any] = {"separator": self.label_separator, "order": self.class_order}
        first, second = find_tables(self.folder, name, self.validation())
        table = read_label_table(first, **options)
        if second is None:
            train, val = divide(table, SplitOptions(share=self.val_share, seed=self.split_seed))
        else:
            train, val = table, read_label_table(second, names=table.names, **options)
        self.class_names = table.names
        self.check_count(first, "classes")
        train = train.rows(range(math.ceil(self.train_share * len(train.images))))
        self._tables = {"training": train, "validation": val}
        make = self.augmentation
        return {
            "train": self._labelled(train, make.train(self.image_size)),
            "val": self._labelled(val, make.eval(self.image_size)),
        }

    def _labelled(self, table: LabelTable, transform: Any) -> SeededDataset:
        files = LabelledFiles(table, transform)
        return self.seeded(files, files.path)

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return notices of classes without images and of unlisted images as well."""
        return super().notices(checked) + table_notices(self._tables)

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
    rule = "has class folders in names of splits (rename these to train and val)"
    refuse(folder, {rule: splits})


def _unused(folder: Path) -> str:
    """Return the message's part about unused folders beside ``train``."""
    folders = [name for name in list_folders(folder) if name != "train"]
    return f"; not used: {first_few(folders)}" if folders else ""
