"""Image pipelines against others on the same files: their content, not their speed."""

import itertools

import pytest
import torch
from timm.data.auto_augment import posterize

from datamodules.dense.masks import StrictMask
from datamodules.dense.toolkit_data import Packed, StrictImage
from datamodules.images.transforms import augment_ops, guarded_posterize
from tools.bench import pipelines

pytestmark = pytest.mark.usefixtures("sample_cache")


@pytest.fixture
def small(monkeypatch):
    """Sample pictures that are generated within a second."""
    monkeypatch.setattr(pipelines, "PHOTOGRAPH", 64)
    monkeypatch.setattr(pipelines, "SCENE", 128)


@pytest.mark.slow
def test_timms_batches_are_like_ours(small):
    ours, name, load = pipelines.class_folders(None, 3)
    ours.setup()
    theirs = load(ours)
    assert name == "timm"
    images, labels = next(iter(theirs))
    batch = ours.normalise(next(iter(ours.train_dataloader())))
    assert images.shape == batch["image"].shape == (3, 3, 224, 224)
    assert images.dtype == batch["image"].dtype == torch.float32
    assert labels.max() < ours.num_classes
    assert len(theirs.dataset) == len(ours.dataset("train"))
    # Timm's own posterize raises whenever it draws 0 bits.
    operations = [op.aug_fn for op in augment_ops(theirs.dataset.transform)]
    assert guarded_posterize in operations
    assert posterize not in operations


def test_the_toolkit_reads_the_masks_that_we_read(small):
    """Compare pixel by pixel, without randomness in the pipelines."""
    ours, _, load = pipelines.ade20k(None, 2)
    ours.setup()
    theirs = load(ours)
    own = ours.dataset("train").dataset
    assert len(theirs.dataset) == len(own)
    strict = {StrictImage, StrictMask, Packed}
    assert strict <= {type(step) for step in own.pipeline.transforms}
    assert not strict & {type(step) for step in theirs.dataset.pipeline.transforms}
    for index in range(2):
        read = []
        for dataset in (own, theirs.dataset):
            results = dataset.get_data_info(index)
            for step in itertools.islice(dataset.pipeline.transforms, 2):
                results = step(results)
            read.append(results["gt_seg_map"])
        assert (read[0] == read[1]).all()
