"""Cityscapes: semantic segmentation of street scenes, 19 classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datamodules.base import Split
from datamodules.dense.masks import MaskCode, consecutive_code
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.files.folders import list_folders, list_images, require_folder, require_names
from datamodules.files.mask_colours import IGNORED
from datamodules.files.text_files import FolderNames
from datamodules.files.values import refuse

SPLIT_FOLDERS: dict[Split, str] = {"train": "train", "val": "val"}
IMAGE = "_leftImg8bit.png"
# Two kinds of masks are supported; createTrainIdLabelImgs.py writes the first.
TRAIN_IDS, LABEL_IDS = "_gtFine_labelTrainIds.png", "_gtFine_labelIds.png"
# Label ids of the classes in the order of their train ids (cityscapesScripts, helpers/labels.py).
IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
LAST_ID = 33


class CityscapesDataModule(SegmentationDataModule):
    """Cityscapes' fine annotations, as train ids if such masks exist, else as label ids.

    Layout: ``leftImg8bit/{train,val}/<city>/*_leftImg8bit.png`` and
    ``gtFine/{train,val}/<city>/*_gtFine_labelTrainIds.png`` or ``*_gtFine_labelIds.png``.

    Predicted label maps have label ids, as the benchmark's server expects.

    Source: https://www.cityscapes-dataset.com/
    """

    layout = "leftImg8bit/{train,val}/<city>/ and gtFine/{train,val}/<city>/"
    mmseg_dataset = "CityscapesDataset"
    example = "data=cityscapes data.root=/data/cityscapes"

    def pairs(self) -> Pairs:
        """Check the folders and detect the kind of masks."""
        folder = self.folder
        images = {split: self._images(folder, name) for split, name in SPLIT_FOLDERS.items()}
        gt = FolderNames(folder / "gtFine")
        every = [image for pairs_of in images.values() for image in pairs_of]
        kinds = [
            kind for kind in (TRAIN_IDS, LABEL_IDS) if any(gt.find(_mask(i, kind)) for i in every)
        ]
        kind = kinds[0] if kinds else LABEL_IDS
        pairs_of = {
            split: [Pair(image, gt.folder / gt.on_disk(_mask(image, kind))) for image in files]
            for split, files in images.items()
        }
        require_names(
            {
                str(pair.mask)
                for pairs in pairs_of.values()
                for pair in pairs
                if not pair.mask.is_file()
            },
            f"images in {folder / 'leftImg8bit'} lack their masks",
            "unpack gtFine_trainvaltest.zip beside it",
        )
        self.class_names = tuple(self.known_metainfo()["classes"])
        self.category_ids = IDS
        self.code = (
            label_ids() if kind == LABEL_IDS else consecutive_code(len(IDS), first=0, ignored=[])
        )
        return pairs_of

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        super().predict_only(class_names, category_ids or IDS)

    def _images(self, folder: Path, split: str) -> list[Path]:
        images = folder / "leftImg8bit" / split
        for part in (images, folder / "gtFine" / split):
            require_folder(part, f"Cityscapes has {self.layout}")
        pairs = [
            images / city / name
            for city in list_folders(images)
            for name in list_images(images / city)
            if name.endswith(IMAGE)
        ]
        refuse(images, {f"holds no <city>/*{IMAGE}; Cityscapes has {self.layout}": not pairs})
        return pairs


def _mask(image: Path, kind: str) -> str:
    """Return the mask of an image, relative to gtFine."""
    return "/".join([*image.parts[-3:-1], image.name.replace(IMAGE, kind)])


def label_ids() -> MaskCode:
    """Return the code of label ids, which ignores all but the 19 classes."""
    rest = tuple(i for i in range(LAST_ID + 1) if i not in IDS)
    meaning = f"Cityscapes' label ids are 0 to {LAST_ID}, and {IGNORED} is ignored"
    return MaskCode(IDS, (*rest, IGNORED), meaning)
