"""Pascal VOC's segmentation layout: lists of names, JPEGs and palette masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.annotation_formats.mask_exports import is_cvat
from datamodules.base import Split
from datamodules.dense.masks import consecutive_code
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.files.folders import first_few, require_folder, require_names
from datamodules.files.text_files import FolderNames, read_lines
from datamodules.files.values import refuse

ARCHIVE_FOLDERS = ("VOCdevkit/VOC2012", "VOC2012")
LISTS = "ImageSets/Segmentation"


class VOCDataModule(SegmentationDataModule):
    """Pascal VOC, 20 classes and the background; 255, the outlines of objects, is ignored.

    Layout: ``JPEGImages/*.jpg``, ``SegmentationClass/*.png`` and
    ``ImageSets/Segmentation/{train,val}.txt``.

    A file ``class_names.txt`` in ``root`` with one name per line overrides VOC's classes.

    Source: http://host.robots.ox.ac.uk/pascal/VOC/

    Args:
        root: VOC2012, or a folder that holds it or VOCdevkit.
        train_list: Name of the list of training images in ImageSets/Segmentation, without .txt.
        val_list: Name of the list of validation images.
        masks_folder: Folder of the masks; SegmentationClassAug for the augmented dataset.
        **options: Options of ``SegmentationDataModule``.
    """

    layout = f"JPEGImages, SegmentationClass and {LISTS}/*.txt"
    mmseg_dataset = "PascalVOCDataset"
    example = "data=voc data.root=/data/VOCdevkit/VOC2012"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        train_list: str = "train",
        val_list: str = "val",
        masks_folder: str = "SegmentationClass",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.lists: dict[Split, str] = {"train": train_list, "val": val_list}
        self.masks_folder = masks_folder

    def pairs(self) -> Pairs:
        """Read the lists and the class names."""
        folder = self.folder
        folder = next((folder / n for n in ARCHIVE_FOLDERS if (folder / n).is_dir()), folder)
        images, masks = folder / "JPEGImages", folder / self.masks_folder
        trains = (folder / LISTS / f"{self.lists['train']}.txt").is_file()
        rule = (
            "is CVAT's Segmentation mask 1.1, with masks in the colours of labelmap.txt; pass "
            "data=segmentation_folder data.layout=cvat"
        )
        refuse(folder, {rule: is_cvat(folder) and not trains})
        for part in (images, masks, folder / LISTS):
            require_folder(part, f"a VOC folder has {self.layout}")
        image_names, mask_names = FolderNames(images), FolderNames(masks)
        pairs_of = {}
        for split, name in self.lists.items():
            stems = _read_list(folder / LISTS / f"{name}.txt", f"data.{split}_list")
            pairs_of[split] = [
                Pair(
                    images / image_names.on_disk(f"{s}.jpg"), masks / mask_names.on_disk(f"{s}.png")
                )
                for s in stems
            ]
        for place, files in (
            (images, {pair.image for pairs in pairs_of.values() for pair in pairs}),
            (masks, {pair.mask for pairs in pairs_of.values() for pair in pairs}),
        ):
            require_names(
                {str(file) for file in files if not file.is_file()},
                f"files listed in {folder / LISTS} are missing in {place}",
                "add them, or remove them from the lists",
            )
        self.class_names = self.read_names(folder)
        self.code = consecutive_code(self.num_classes, first=0, ignored=[])
        self.category_ids = self.code.values
        return pairs_of

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        super().predict_only(class_names, category_ids or range(len(class_names)))


def _read_list(file: Path, option: str) -> list[str]:
    choices = first_few(sorted(path.stem for path in file.parent.glob("*.txt")))
    remedy = f"pass {option}=<one of {choices}>"
    require_names([] if file.is_file() else [str(file)], "list does not exist", remedy)
    stems = [line for line in read_lines(file) if line]
    faults = {
        "must list images, one name per line without ending, but is empty": not stems,
        "lists images twice": [stem for stem, count in Counter(stems).items() if count > 1],
    }
    refuse(file, faults)
    return stems
