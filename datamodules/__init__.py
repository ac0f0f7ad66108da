"""Datasets as Lightning datamodules: one class per layout on disk, and sample data."""

from datamodules.base import BaseDataModule
from datamodules.dense.ade20k import ADE20KDataModule
from datamodules.dense.cityscapes import CityscapesDataModule
from datamodules.dense.coco import CocoDataModule
from datamodules.dense.segmentation_folder import SegmentationFolderDataModule
from datamodules.dense.voc import VOCDataModule
from datamodules.images.cifar100 import CIFAR10DataModule, CIFAR100DataModule
from datamodules.images.class_folders import ClassFoldersDataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.image_parquet import ImageParquetDataModule
from datamodules.images.image_tars import ImageTarsDataModule
from datamodules.images.inaturalist import INaturalist2019DataModule
from datamodules.images.robustness import RobustnessDataModule
from datamodules.images.transforms import Augmentation, LightAugmentation, PaperAugmentation
from datamodules.sample.datamodules import (
    SampleClassification,
    SampleDetection,
    SampleMultiLabel,
    SampleSegmentation,
    SampleTransfer,
)

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
    "SampleMultiLabel",
    "SampleSegmentation",
    "SampleTransfer",
    "SegmentationFolderDataModule",
    "VOCDataModule",
]
