"""Datasets as Lightning datamodules: one class per layout on disk, and sample data.

Importing this package is light: the file of a name below is imported on its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.base import BaseDataModule
    from datamodules.dense.ade20k import ADE20KDataModule
    from datamodules.dense.cityscapes import CityscapesDataModule
    from datamodules.dense.coco import CocoDataModule
    from datamodules.dense.segmentation_folder import SegmentationFolderDataModule
    from datamodules.dense.voc import VOCDataModule
    from datamodules.images.cifar100 import CIFAR10DataModule, CIFAR100DataModule
    from datamodules.images.class_folders import ClassFoldersDataModule
    from datamodules.images.elpv import ElpvDataModule
    from datamodules.images.idx import FashionMNISTDataModule
    from datamodules.images.image_folder import ImageFolderDataModule
    from datamodules.images.image_parquet import ImageParquetDataModule
    from datamodules.images.image_tars import ImageTarsDataModule
    from datamodules.images.inaturalist import INaturalist2019DataModule
    from datamodules.images.robustness import RobustnessDataModule
    from datamodules.images.transforms import Augmentation, LightAugmentation, PaperAugmentation
    from datamodules.sample.datamodules import (
        SampleClassification,
        SampleMultiLabel,
        SampleTransfer,
    )
    from datamodules.sample.dense import SampleDetection, SampleSegmentation

__all__ = [
    "ADE20KDataModule",
    "Augmentation",
    "BaseDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "CityscapesDataModule",
    "ClassFoldersDataModule",
    "CocoDataModule",
    "ElpvDataModule",
    "FashionMNISTDataModule",
    "INaturalist2019DataModule",
    "ImageFolderDataModule",
    "ImageParquetDataModule",
    "ImageTarsDataModule",
    "LightAugmentation",
    "PaperAugmentation",
    "RobustnessDataModule",
    "SampleClassification",
    "SampleDetection",
    "SampleMultiLabel",
    "SampleSegmentation",
    "SampleTransfer",
    "SegmentationFolderDataModule",
    "VOCDataModule",
]
_MODULES = {
    "base": ("BaseDataModule",),
    "dense.ade20k": ("ADE20KDataModule",),
    "dense.cityscapes": ("CityscapesDataModule",),
    "dense.coco": ("CocoDataModule",),
    "dense.segmentation_folder": ("SegmentationFolderDataModule",),
    "dense.voc": ("VOCDataModule",),
    "images.cifar100": ("CIFAR10DataModule", "CIFAR100DataModule"),
    "images.class_folders": ("ClassFoldersDataModule",),
    "images.elpv": ("ElpvDataModule",),
    "images.idx": ("FashionMNISTDataModule",),
    "images.image_folder": ("ImageFolderDataModule",),
    "images.image_parquet": ("ImageParquetDataModule",),
    "images.image_tars": ("ImageTarsDataModule",),
    "images.inaturalist": ("INaturalist2019DataModule",),
    "images.robustness": ("RobustnessDataModule",),
    "images.transforms": ("Augmentation", "LightAugmentation", "PaperAugmentation"),
    "sample.datamodules": ("SampleClassification", "SampleMultiLabel", "SampleTransfer"),
    "sample.dense": ("SampleDetection", "SampleSegmentation"),
}

if not TYPE_CHECKING:  # type checkers use the imports above

    def __getattr__(name: str) -> Any:
        """Import a name of the package from its module."""
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"datamodules.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
