"""Sample and real datasets have the same options; values out of their ranges are named."""

import pytest
import yaml

from datamodules import (
    ClassFoldersDataModule,
    CocoDataModule,
    ImageFolderDataModule,
    RobustnessDataModule,
    SegmentationFolderDataModule,
)
from datamodules.generation.images import GenerationDataModule
from datamodules.points.folders import CloudFolderDataModule, S3DISDataModule
from datamodules.super_resolution.folders import BenchmarkDataModule, ImageFolderSRDataModule
from datamodules.text.glue import GlueDataModule
from tests.errors import refuses
from tests.runs import CONFIGS

# Options that locate a dataset's files or generate samples.
FOLDERS = {"num_classes", "train_share", "class_order", "token_labels", "token_boxes"}
SPLIT = {"val_share", "split_seed", "val_split"}
TABLE = {"labels", "label_separator"}
BANDS = {"bands", "band_mean", "band_std"}
CONTAINERS = {"imagenet_tar", "imagenet_parquet"}  # their images are no files to divide
SHARDS = {"cache_dir", "image_column", "label_column", "label_key"}
EXPORTS = {"layout", "train_split", *SPLIT}
LOCATIONS = {*EXPORTS, "train_annotations", "train_images", "val_annotations", "val_images"}
GENERATED = {"scene_size", "picture_size", "sample_seed", "num_train", "num_val",
             "digits_per_class", "train_copies", "val_copies", "train_per_class",
             "val_per_class"}  # fmt: skip


def options(name):
    return set(yaml.safe_load((CONFIGS / "data" / f"{name}.yaml").read_text())["data"])


@pytest.mark.parametrize(
    ("sample", "real"),
    [("sample_classification", "imagenet"), ("sample_transfer", "cifar100"),
     ("sample_detection", "coco"), ("sample_segmentation", "ade20k")],
)  # fmt: skip
def test_sample_and_real_datasets_have_the_same_options(sample, real):
    assert options(sample) - GENERATED == options(real) - LOCATIONS
    size = {"image_size"} & options(real) or {"scale"}
    assert {"eval_batch_size", "num_workers", *size} <= options(real)


@pytest.mark.parametrize(
    "other", ["folder", "inaturalist2019", "imagenet_tar", "imagenet_parquet", "cifar10"]
)
def test_datasets_of_one_kind_have_the_same_options(other):
    kind = "cifar100" if other == "cifar10" else "imagenet"
    expected = options(kind) - ({"selection_share"} if other in CONTAINERS else set())
    own = options(other) - SPLIT - SHARDS - TABLE - BANDS - {"_like_"} | FOLDERS & expected
    assert own == expected


@pytest.mark.parametrize(
    ("kind", "option", "value", "rule"),
    [
        (ImageFolderDataModule, "batch_size", 0, "the lowest value is 1"),
        (ImageFolderDataModule, "num_workers", -1, "the lowest value is 0"),
        (ImageFolderDataModule, "seed", -1, "the lowest value is 0"),
        (ImageFolderDataModule, "train_share", 0, "above 0 and at most 1"),
        (ImageFolderDataModule, "train_share", 1.5, "above 0 and at most 1"),
        (ImageFolderDataModule, "bands", 13, "from 1 to 12"),
        (ClassFoldersDataModule, "val_share", 1, "between 0 and 1"),
        (ClassFoldersDataModule, "split_seed", -1, "the lowest value is 0"),
        (SegmentationFolderDataModule, "val_share", 0, "between 0 and 1"),
        (SegmentationFolderDataModule, "values", [0, 256], "numbers from 0 to 255"),
        (CocoDataModule, "test_scales", [0], "factors above 0"),
        (RobustnessDataModule, "sets", ["imagenet_x"], "sets of "),
        (RobustnessDataModule, "crop_pct", 0, "above 0 and at most 1"),
        (CloudFolderDataModule, "grid_size", 0, "above 0 metres"),
        (CloudFolderDataModule, "crop_share", 0, "above 0 and up to 1"),
        (CloudFolderDataModule, "drop_points", 1, "from 0 to below 1"),
        (CloudFolderDataModule, "features", [], "some of "),
        (S3DISDataModule, "val_area", 7, "from 1 to 6"),
        (ImageFolderSRDataModule, "val_share", 1, "between 0 and 1"),
        (BenchmarkDataModule, "sets", ["Set6"], "sets of "),
        (GenerationDataModule, "channels", 2, "1 or 3"),
        (GenerationDataModule, "latent_channels", 0, "the lowest value is 1"),
        (GlueDataModule, "set", "sst3", "one of "),
        (GlueDataModule, "max_tokens", 7, "from 8 to "),
    ],
)
def test_values_out_of_their_range_are_named(kind, option, value, rule):
    refuses(rf"data\.{option}\b.*{rule}", kind, None, **{option: value})
