"""Image pipelines against others on the same files: their content, not their speed."""

import itertools
import json

import pytest
import torch
from timm.data.auto_augment import posterize

from datamodules.dense.masks import StrictMask
from datamodules.dense.toolkit_data import Packed, StrictImage
from datamodules.images.transforms import augment_ops, guarded_posterize
from tools import benchmark
from tools.bench import pipelines

pytestmark = pytest.mark.usefixtures("sample_cache")


@pytest.fixture
def small(monkeypatch):
    """Sample pictures that are generated within a second."""
    monkeypatch.setattr(pipelines, "PHOTOGRAPH", 64)
    monkeypatch.setattr(pipelines, "SCENE", 128)


@pytest.mark.parametrize(
    ("task", "other"),
    [("classification", "timm"), ("detection", "mmdet"), ("segmentation", "mmseg")],
)
@pytest.mark.slow
def test_both_pipelines_are_in_the_table(small, capsys, task, other):
    typed = ["data", f"task={task}", "rounds=2", "batch=2", "format=json", "keep_memory=false"]
    assert benchmark.main(typed) == 0
    theirs, ours = json.loads(capsys.readouterr().out)
    assert (theirs["pipeline"], ours["pipeline"]) == (other, "ours")
    assert theirs["ratio"] == 1
    assert ours["images_per_second"] > 0


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


@pytest.mark.slow
def test_each_epoch_has_other_random_numbers(small):
    """Otherwise the cost of one random draw would be measured again and again."""
    ours, _, _ = pipelines.class_folders(None, 100)
    ours.setup()
    loader = ours.train_dataloader()
    batches = itertools.islice(pipelines.repeat_batches(loader), len(loader) + 1)
    first, *_, again = (batch["image"] for batch in batches)
    assert not torch.equal(first, again)
    assert torch.equal(first, next(iter(pipelines.repeat_batches(loader)))["image"])
