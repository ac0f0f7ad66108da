"""Pascal VOC's segmentation layout: lists of names, JPEGs and palette masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.dense.masks import consecutive, read_class_names
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.files import first_few, require_folder, require_names
from datamodules.files.text_files import FolderNames, read_lines
from datamodules.layouts.mask_exports import is_cvat

ARCHIVE_FOLDERS = ("VOCdevkit/VOC2012", "VOC2012")
LISTS = "ImageSets/Segmentation"


class VOCDataModule(SegmentationDataModule):
    """Pascal VOC, 20 classes and the background; 255, the outlines of objects, is ignored.

    The classes are VOC's, unless ``root`` holds a ``class_names.txt`` with one name a line.

    Args:
        root: VOC2012, or a folder that holds it or VOCdevkit.
        train_list: Name in ImageSets/Segmentation of the list of training images, without .txt.
        val_list: The same for validation.
        masks_folder: Folder of the masks; SegmentationClassAug for those of the augmented set.
        **options: Of ``SegmentationDataModule``.
    """

    layout = f"JPEGImages, SegmentationClass and {LISTS}/*.txt"
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

    def known_metainfo(self) -> dict[str, Any]:
        """Names and colours of VOC's classes."""
        return voc_metainfo()

    def pairs(self) -> Pairs:
        """Read the lists and the names of the classes."""
        folder = self.folder
        folder = next((folder / n for n in ARCHIVE_FOLDERS if (folder / n).is_dir()), folder)
        images, masks = folder / "JPEGImages", folder / self.masks_folder
        if is_cvat(folder) and not (folder / LISTS / f"{self.lists['train']}.txt").is_file():
            raise ValueError(
                f"{folder} is CVAT's Segmentation mask 1.1, whose masks are in the colours of "
                "labelmap.txt; pass data=segmentation_folder data.layout=cvat"
            )
        for part in (images, masks, folder / LISTS):
            require_folder(part, f"a VOC folder has {self.layout}")
        of_image, of_mask = FolderNames(images), FolderNames(masks)
        found = {}
        for split, name in self.lists.items():
            stems = _read_list(folder / LISTS / f"{name}.txt", f"data.{split}_list")
            found[split] = [
                Pair(images / of_image.on_disk(f"{s}.jpg"), masks / of_mask.on_disk(f"{s}.png"))
                for s in stems
            ]
        for place, files in (
            (images, {pair.image for pairs in found.values() for pair in pairs}),
            (masks, {pair.mask for pairs in found.values() for pair in pairs}),
        ):
            require_names(
                {str(file) for file in files if not file.is_file()},
                f"files that {folder / LISTS} lists are not in {place}",
                "add them, or take them from the lists",
            )
        file = folder / "class_names.txt"
        known = tuple(voc_metainfo()["classes"])
        self.class_names = read_class_names(file) if file.is_file() else known
        self.code = consecutive(self.num_classes, first=0, ignored=[])
        self.category_ids = self.code.values
        return found

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        super().predict_only(class_names, category_ids or range(len(class_names)))


def _read_list(file: Path, option: str) -> list[str]:
    if not file.is_file():
        there = first_few(sorted(path.stem for path in file.parent.glob("*.txt")))
        raise FileNotFoundError(f"no list {file}; pass {option}=<one of {there}>")
    stems = [line for line in read_lines(file) if line]
    if not stems:
        raise ValueError(f"{file} lists no image; it has a name a line, without an ending")
    if len(set(stems)) < len(stems):
        twice = sorted({stem for stem in stems if stems.count(stem) > 1})
        raise ValueError(f"{file} lists images twice: {first_few(twice)}")
    return stems


def voc_metainfo() -> dict[str, Any]:
    """Names and colours of VOC's classes, the background first."""
    from mmseg.datasets import PascalVOCDataset

    return dict(PascalVOCDataset.METAINFO)
