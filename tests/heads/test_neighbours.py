"""An image's predictions are the same alone and in a batch of images of other sizes."""

import copy

import pytest
import torch

from tests.dense_heads import DENSE, SIZES, pictures, serving_data, small_model, task_of
from tests.families import rest_slow

QUICK = ("retinanet", "mask_rcnn", "upernet")
SEGMENTORS = [name for name in DENSE if task_of(name) == "segmentation"]
VIEWS = {"test_scales": [0.75, 1.0], "test_flip": True}
WINDOWS = {"test_crop": 48, "test_stride": 32}


def batches(name, batch_size, **options):
    data = serving_data(task_of(name), batch_size, **options)
    data.set_predict_inputs(pictures())
    return list(data.predict_dataloader())


def prediction_tensors(sample):
    if "seg_logits" in sample:
        return {"logits": sample.seg_logits.data}
    return {key: torch.as_tensor(value) for key, value in sample.pred_instances.items()}


def check_same(together, alone):
    assert [sample.img_path for sample in together] == [f"image {i}" for i in range(len(SIZES))]
    assert len(alone) == len(SIZES)
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        found, expected = prediction_tensors(one), prediction_tensors(other)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert len(value) > 9
            # A batch of one is bit-equal; larger batches round products differently.
            exact = {"rtol": 0, "atol": 0} if number in (1, 3) else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(found[key], value, **exact)


@pytest.mark.parametrize("name", rest_slow(DENSE, QUICK))
@torch.no_grad()
def test_batches_of_several_sizes(name, one_thread):
    """Each prediction equals the toolkit's own test step for a batch of one."""
    model = small_model(name)
    (batch,) = batches(name, len(SIZES))
    alone = [sample for one in batches(name, 1) for sample in model.model.test_step(one)]
    check_same(model.predict(batch), alone)
    check_same([s for some in batches(name, 3) for s in model.predict(some)], alone)


@pytest.mark.parametrize("name", rest_slow([n for n in DENSE if "mask_rcnn" not in n], ()))
@torch.no_grad()
def test_augmented_views_in_batches_of_several_sizes(name, one_thread):
    model = small_model(name)
    (batch,) = batches(name, len(SIZES), **VIEWS)
    alone = [sample for one in batches(name, 1, **VIEWS) for sample in model.predict(one)]
    check_same(model.predict(batch), alone)


@pytest.mark.parametrize("name", rest_slow(SEGMENTORS, ()))
@torch.no_grad()
def test_sliding_windows_in_batches_of_several_sizes(name, one_thread):
    model = small_model(name, **WINDOWS)
    (batch,) = batches(name, len(SIZES))
    first, *others = batches(name, 1)
    alone = [s for one in (copy.deepcopy(first), *others) for s in model.predict(one)]
    check_same(model.predict(batch), alone)
    # Compare with the toolkit's own windows on an unpadded image; Mask2Former rejects padding.
    model.model.data_preprocessor.test_cfg = None
    (found,) = model.model.test_step(first)
    assert torch.equal(found.seg_logits.data, alone[0].seg_logits.data)
