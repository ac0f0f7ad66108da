"""Sample and real datasets have the same options, so one command line works with both."""

import pytest
import yaml

from tests.runs import CONFIGS

# Options that locate a dataset's files or generate samples.
FOLDERS = {"num_classes", "train_share", "class_order", "token_labels", "token_boxes"}
SPLIT = {"val_share", "split_seed", "val_split"}
TABLE = {"labels", "label_separator"}
BANDS = {"bands", "band_mean", "band_std"}
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
    own = options(other) - SPLIT - SHARDS - TABLE - BANDS - {"_like_"} | FOLDERS & options(kind)
    assert own == options(kind)
