"""ADE20K scene parsing: semantic segmentation from folders of JPEGs and masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.dense.masks import consecutive, read_class_names
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.dense.segmentation_folder import by_stem, listed
from datamodules.files import require_folder, require_names

ARCHIVE_FOLDER = "ADEChallengeData2016"
FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}


class ADE20KDataModule(SegmentationDataModule):
    """Any set in the layout of ADEChallengeData2016: label 0 is ignored, class i has label i + 1.

    The classes are ADE20K's 150, unless ``root`` holds a ``class_names.txt`` with one name a line.
    ``root`` is the folder that holds ``images`` and ``annotations``, or the one that holds that.
    """

    layout = "images/training, images/validation, annotations/training and annotations/validation"
    example = f"data=ade20k data.root=/data/{ARCHIVE_FOLDER}"
    reduces_zero_label = True
    two_values = (
        "label them 1 and 2, or pass the folders by data=segmentation_folder and "
        "data.values=[0,255]"
    )

    def known_metainfo(self) -> dict[str, Any]:
        """Names and colours of ADE20K's 150 classes."""
        return ade20k_metainfo()

    def pairs(self) -> Pairs:
        """Check the folders and read the names of the classes."""
        folder = self.folder
        if (folder / ARCHIVE_FOLDER).is_dir():
            folder = folder / ARCHIVE_FOLDER
        found = {
            split: checked_pairs(folder / "images" / name, folder / "annotations" / name)
            for split, name in FOLDERS.items()
        }
        self.class_names = class_names(folder)
        self.code = consecutive(self.num_classes, first=1, ignored=[0])
        self.category_ids = self.code.values
        return found

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        super().predict_only(class_names, category_ids or range(1, len(class_names) + 1))


def ade20k_metainfo() -> dict[str, Any]:
    """Names and colours of ADE20K's 150 classes."""
    from mmseg.datasets import ADE20KDataset

    return dict(ADE20KDataset.METAINFO)


def class_names(folder: Path) -> tuple[str, ...]:
    """The names in ``class_names.txt``, or ADE20K's where there is no such file."""
    file = folder / "class_names.txt"
    return read_class_names(file) if file.is_file() else tuple(ade20k_metainfo()["classes"])


def checked_pairs(images: Path, masks: Path) -> list[Pair]:
    """Each image (.jpg) with its mask (.png), in the order of their names.

    Raises:
        FileNotFoundError: One has no counterpart.
    """
    for folder in (images, masks):
        require_folder(folder, f"an ADE20K folder has {ADE20KDataModule.layout}")
    of_image = by_stem(images, listed(images, {".jpg"}))
    of_mask = by_stem(masks, listed(masks, {".png"}))
    if not of_image:
        raise ValueError(
            f"no .jpg images in {images}; an ADE20K folder has {ADE20KDataModule.layout}"
        )
    require_names(
        {str(masks / f"{stem}.png") for stem in of_image.keys() - of_mask},
        f"images in {images} lack their masks",
        "add the masks or remove the images",
    )
    require_names(
        {str(images / f"{stem}.jpg") for stem in of_mask.keys() - of_image},
        f"masks in {masks} lack their images",
        "add the images or remove the masks",
    )
    return [Pair(images / of_image[stem], masks / of_mask[stem]) for stem in sorted(of_image)]
