"""ScanNet, ScanNet200 and S3DIS as Pointcept prepares them, and folders of labelled clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files.folders import VALIDATION, require_names
from datamodules.files.text_files import read_lines
from datamodules.files.values import check_option
from datamodules.points.base import PointDataModule
from datamodules.points.clouds import is_cloud
from datamodules.points.scannet200 import NAMES as SCANNET200

SCANNET = (
    "wall", "floor", "cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf",
    "picture", "counter", "desk", "curtain", "refrigerator", "shower curtain", "toilet", "sink",
    "bathtub", "other furniture",
)  # fmt: skip
S3DIS = (
    "ceiling", "floor", "wall", "beam", "column", "window", "door", "table", "chair", "sofa",
    "bookcase", "board", "clutter",
)  # fmt: skip
AREAS = tuple(range(1, 7))
CLASSES = "classes.txt"


def list_clouds(folder: Path) -> list[Path]:
    """Return the clouds in a folder, sorted by name; none if it does not exist."""
    return sorted(filter(is_cloud, folder.iterdir())) if folder.is_dir() else []


class ScanNetDataModule(PointDataModule):
    """ScanNet: folders train, val and test with a cloud per scene.

    A scene is a folder with coord.npy, color.npy, normal.npy and segment20.npy, or a .pth file.

    Source: Dai et al., "ScanNet", CVPR 2017; Pointcept's preprocessing.
    """

    layout = "folders train and val, with a folder (coord.npy, ...) or .pth file per scene"
    example = "data=scannet data.root=/data/scannet"
    class_names: tuple[str, ...] = SCANNET
    label = "segment20"

    def find_clouds(self, split: Split) -> list[Path]:
        """Return the scenes of a split; the published test scenes lack labels and are left out."""
        return [] if split == "test" else list_clouds(self.folder / split)


class ScanNet200DataModule(ScanNetDataModule):
    """ScanNet with 200 classes: segment200.npy, or semantic_gt200 of .pth files.

    Source: Rozenberszki et al., "Language-Grounded Indoor 3D Semantic Segmentation in the Wild",
    ECCV 2022.
    """

    example = "data=scannet200 data.root=/data/scannet"
    class_names = SCANNET200
    label = "segment200"


class S3DISDataModule(PointDataModule):
    """S3DIS: folders Area_1 to Area_6 with a cloud per room; one area is for validation.

    Args:
        root: Folder of the areas.
        val_area: Number of the area to validate with.
        **options: Of ``PointDataModule``.

    Raises:
        ValueError: The area is unknown.

    Source: Armeni et al., "3D Semantic Parsing of Large-Scale Indoor Spaces", CVPR 2016.
    """

    layout = "folders Area_1 to Area_6, with a folder (coord.npy, ...) or .pth file per room"
    example = "data=s3dis data.root=/data/s3dis"
    class_names = S3DIS

    def __init__(
        self, root: str | Path | None = None, *, val_area: int = 5, **options: Any
    ) -> None:
        super().__init__(root, **options)
        check_option("val_area", val_area, val_area in AREAS, "from 1 to 6")
        self.val_area = val_area

    def find_clouds(self, split: Split) -> list[Path]:
        """Return the rooms of the validation area, or of all others for training."""
        missing = [area for area in AREAS if not (self.folder / f"Area_{area}").is_dir()]
        remedy = f"the folder must hold {self.layout}"
        names = [f"Area_{area}" for area in missing]
        require_names(names, f"areas are missing in {self.folder}", remedy)
        areas = {"train": [area for area in AREAS if area != self.val_area], "val": [self.val_area]}
        return [
            room
            for area in areas.get(split, [])
            for room in list_clouds(self.folder / f"Area_{area}")
        ]


class CloudFolderDataModule(PointDataModule):
    """Labelled clouds (.ply, .npy, .pth or folders of npy) in folders train, val and maybe test.

    classes.txt names a class per line, in the order of the labels.
    """

    layout = "classes.txt, and folders train and val with .ply or .npy clouds"
    example = "data=cloud_folder data.root=/data/clouds"

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Number of features; the classes are read here, before the network is built."""
        self._read_classes()
        return super().backbone_arguments

    def _read_classes(self) -> None:
        if self.class_names:
            return
        file = self.folder / CLASSES
        remedy = "write one class name per line"
        require_names([] if file.is_file() else [str(file)], "list of classes is missing", remedy)
        self.class_names = tuple(filter(None, read_lines(file)))

    def find_clouds(self, split: Split) -> list[Path]:
        """Return the clouds of a split."""
        self._read_classes()
        names = VALIDATION if split == "val" else (split,)
        return next(filter(None, (list_clouds(self.folder / name) for name in names)), [])
