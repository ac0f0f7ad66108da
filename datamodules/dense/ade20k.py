"""ADE20K scene parsing: semantic segmentation from folders of JPEGs and masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datamodules.base import Split
from datamodules.dense.masks import consecutive_code
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.dense.segmentation_folder import index_by_stem, list_files
from datamodules.files.folders import require_folder, require_names
from datamodules.files.values import refuse

ARCHIVE_FOLDER = "ADEChallengeData2016"
FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}


class ADE20KDataModule(SegmentationDataModule):
    """ADE20K, or any dataset in its layout: label 0 is ignored, class i has label i + 1.

    Layout: ``images/{training,validation}/*.jpg`` and ``annotations/{training,validation}/*.png``,
    in ``root`` or ``root/ADEChallengeData2016``.

    The classes are ADE20K's 150; a file ``class_names.txt`` with one name per line overrides them.

    Source: http://sceneparsing.csail.mit.edu/
    """

    layout = "images/training, images/validation, annotations/training and annotations/validation"
    example = f"data=ade20k data.root=/data/{ARCHIVE_FOLDER}"
    mmseg_dataset = "ADE20KDataset"
    reduces_zero_label = True
    two_values = (
        "label them 1 and 2, or pass the folders with data=segmentation_folder and "
        "data.values=[0,255]"
    )

    def pairs(self) -> Pairs:
        """Check the folders and read the class names."""
        folder = self.folder
        if (folder / ARCHIVE_FOLDER).is_dir():
            folder = folder / ARCHIVE_FOLDER
        pairs = {
            split: pair_files(folder / "images" / name, folder / "annotations" / name)
            for split, name in FOLDERS.items()
        }
        self.class_names = self.read_names(folder)
        self.code = consecutive_code(self.num_classes, first=1, ignored=[0])
        self.category_ids = self.code.values
        return pairs

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        super().predict_only(class_names, category_ids or range(1, len(class_names) + 1))


def pair_files(images: Path, masks: Path) -> list[Pair]:
    """Return each image (.jpg) with its mask (.png), sorted by name.

    Raises:
        FileNotFoundError: An image or mask lacks its counterpart.
    """
    for folder in (images, masks):
        require_folder(folder, f"an ADE20K folder has {ADE20KDataModule.layout}")
    image_of = index_by_stem(images, list_files(images, {".jpg"}))
    mask_of = index_by_stem(masks, list_files(masks, {".png"}))
    rule = f"holds no .jpg images; an ADE20K folder has {ADE20KDataModule.layout}"
    refuse(images, {rule: not image_of})
    require_names(
        {str(masks / f"{stem}.png") for stem in image_of.keys() - mask_of},
        f"images in {images} lack their masks",
        "add the masks or remove the images",
    )
    require_names(
        {str(images / f"{stem}.jpg") for stem in mask_of.keys() - image_of},
        f"masks in {masks} lack their images",
        "add the images or remove the masks",
    )
    return [Pair(images / image_of[stem], masks / mask_of[stem]) for stem in sorted(image_of)]
