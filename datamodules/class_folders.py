"""Any folder of classes, with a validation split drawn from it where it has none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.base import at_least
from datamodules.class_listing import list_classes
from datamodules.class_order import in_order
from datamodules.console import say
from datamodules.files import first_few, validation_folder
from datamodules.image_folder import ImageFolderDataModule, class_folders, first_of_each
from datamodules.sampling import SeededDataset
from datamodules.text_files import nfc


class ClassFoldersDataModule(ImageFolderDataModule):
    """Class folders directly in ``root`` or in ``root/train``; validation is drawn from them.

    A folder ``val`` (or ``valid``, ``validation``) beside ``train`` is taken instead, if there is
    one. Which images are drawn depends on their names and ``split_seed`` alone: the same ones in
    every run, and images that are added later hardly move others from one side to the other.

    Args:
        root: The folder.
        val_share: Share of each class's images that validate; at least one of each, and one is
            left to train with.
        split_seed: Draws other images.
        **options: Of ``ImageFolderDataModule``.

    Raises:
        ValueError: A share that leaves nothing to train or to validate with.
    """

    layout = "<class>/*.jpg, or train/<class>/*.jpg with or without val/<class>/*.jpg"
    example = "data=folder data.root=/data/pets data.val_share=0.1"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        val_share: float = 0.1,
        split_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        if not 0 < val_share < 1:
            raise ValueError(
                f"data.val_share={val_share} is no share; give a number between 0 and 1, such as "
                "0.1"
            )
        self.val_share = val_share
        self.split_seed = at_least("split_seed", split_seed, 0)

    def build(self) -> dict[Any, SeededDataset]:
        """List the images and divide them, unless they are divided already."""
        train = self.folder / "train"
        if train.is_dir() and validation_folder(self.folder).is_dir():
            return super().build()
        folder = train if train.is_dir() else self.folder
        self.class_names = tuple(in_order(class_folders(folder), self.class_order))
        self.check_count(folder)
        images = list_classes(folder, self.class_names)
        few = [name for name, found in images.items() if len(found) < 2]
        if few:
            raise ValueError(
                f"class folders of {folder} with fewer than two images, one to train with and one "
                f"to validate: {first_few(few)}; fill or remove them"
            )
        drawn = {name: self._draw(found) for name, found in images.items()}
        chosen = {
            "train": {name: sorted(set(images[name]) - drawn[name]) for name in images},
            "val": {name: sorted(drawn[name]) for name in images},
        }
        counts = {split: sum(map(len, parts.values())) for split, parts in chosen.items()}
        say(
            f"{folder} has no validation folder: {counts['val']} of its {sum(counts.values())} "
            f"images validate (data.val_share={self.val_share}, data.split_seed={self.split_seed})"
        )
        make, training = self.augmentation, first_of_each(chosen["train"], self.train_share)
        return {
            "train": self.labelled(folder, training, self.train_transform()),
            "val": self.labelled(folder, chosen["val"], make.eval(self.image_size)),
        }

    def _draw(self, images: Sequence[str]) -> set[str]:
        """The images of a class that validate."""
        count = min(max(1, round(self.val_share * len(images))), len(images) - 1)

        def place(image: str) -> bytes:
            key = nfc(f"{self.split_seed}/{image}").encode("utf-8", "surrogateescape")
            return hashlib.sha256(key).digest()

        return set(sorted(images, key=place)[:count])
