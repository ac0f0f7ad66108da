"""Datasets as Lightning datamodules: one class per layout on disk, and sample data."""

from datamodules.ade20k import ADE20KDataModule
from datamodules.base import BaseDataModule
from datamodules.cifar100 import CIFAR10DataModule, CIFAR100DataModule
from datamodules.cityscapes import CityscapesDataModule
from datamodules.class_folders import ClassFoldersDataModule
from datamodules.coco import CocoDataModule
from datamodules.image_folder import ImageFolderDataModule
from datamodules.image_parquet import ImageParquetDataModule
from datamodules.image_tars import ImageTarsDataModule
from datamodules.inaturalist import INaturalist2019DataModule
from datamodules.robustness import RobustnessDataModule
from datamodules.sample import (
    SampleClassification,
    SampleDetection,
    SampleSegmentation,
    SampleTransfer,
)
from datamodules.segmentation_folder import SegmentationFolderDataModule
from datamodules.transforms import Augmentation, LightAugmentation, PaperAugmentation
from datamodules.voc import VOCDataModule

__all__ = [
    "ADE20KDataModule",
    "Augmentation",
    "BaseDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "CityscapesDataModule",
    "ClassFoldersDataModule",
    "CocoDataModule",
    "INaturalist2019DataModule",
    "ImageFolderDataModule",
    "ImageParquetDataModule",
    "ImageTarsDataModule",
    "LightAugmentation",
    "PaperAugmentation",
    "RobustnessDataModule",
    "SampleClassification",
    "SampleDetection",
    "SampleSegmentation",
    "SampleTransfer",
    "SegmentationFolderDataModule",
    "VOCDataModule",
]
