"""An image of a batch gets the prediction that it gets alone, whatever the others' sizes."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import SampleDetection, SampleSegmentation
from tests.families import short
from tests.heads.test_head_configs import DENSE, FEW, HEADS, model_of

# (W, H); padded to multiples of 32 the first and the third have one size, which a window covers.
SIZES = ((64, 64), (64, 30), (48, 64), (30, 64))
QUICK = ("retinanet", "mask_rcnn", "dino", "upernet")
VIEWS = {"test_scales": [0.75, 1.0], "test_flip": True}
WINDOWS = {"test_crop": 32, "test_stride": 24}
KINDS = {"detection": SampleDetection, "segmentation": SampleSegmentation}
# Narrow layers and few masks, which take the longest.
NARROW = {
    "mask_rcnn": {"bbox_head.fc_out_channels": 32, "mask_head.num_convs": 1},
    "cascade_mask_rcnn": {f"bbox_head.{stage}.fc_out_channels": 32 for stage in range(3)},
}


def built(name, **more):
    head = HEADS[name]
    (task,) = head["_tasks_"]
    torch.manual_seed(0)
    options = {f"roi_head.{key}": value for key, value in NARROW.get(name, {}).items()}
    if "mask_rcnn" in name:
        options["test_cfg.rcnn.max_per_img"] = 12
    model = model_of(head, short("swin_t", dense=True), 10, **FEW[task], options=options, **more)
    for key, value in model.named_parameters():
        if key.endswith(("retina_cls.bias", "conv_seg.bias")):
            value.data.fill_(-1.0)  # so that something is found
    return model.eval(), task


def pictures():
    generator = np.random.default_rng(0)
    for width, height in SIZES:
        small = generator.integers(0, 255, (height // 6, width // 6, 3), dtype=np.uint8)
        yield Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def batches(task, batch_size, **options):
    data = KINDS[task](num_workers=0, scale=64, eval_batch_size=batch_size, **options)
    data.predict_only([str(number) for number in range(10)], range(1, 11))
    data.take(list(pictures()))
    return list(data.predict_dataloader())


def results(samples, task):
    """What is found in each image, as tensors."""
    if task == "segmentation":
        return [{"logits": sample.seg_logits.data} for sample in samples]
    return [
        {key: torch.as_tensor(value) for key, value in sample.pred_instances.items()}
        for sample in samples
    ]


def check_same(together, alone, task):
    assert len(together) == len(alone) == len(SIZES)
    for number, (one, other) in enumerate(
        zip(results(together, task), results(alone, task), strict=True)
    ):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert len(value) > 9
            # Batches of one are equal to the bit; a batch of several rounds products otherwise.
            exact = {"rtol": 0, "atol": 0} if number in (1, 3) else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(one[key], value, **exact)


def rest_slow(names):
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", rest_slow(DENSE))
@torch.no_grad()
def test_a_batch_of_several_sizes(name, one_thread):
    """Each image's prediction is that of the toolkit's own test step for a batch of one."""
    model, task = built(name)
    (batch,) = batches(task, len(SIZES))
    together = model.predict(batch)
    assert [sample.img_path for sample in together] == [f"image {i}" for i in range(len(SIZES))]
    alone = [sample for one in batches(task, 1) for sample in model.model.test_step(one)]
    check_same(together, alone, task)
    again = [sample for some in batches(task, 3) for sample in model.predict(some)]
    check_same(again, alone, task)


@pytest.mark.parametrize("name", rest_slow([n for n in DENSE if "mask_rcnn" not in n]))
@torch.no_grad()
def test_views_of_several_sizes(name, one_thread):
    model, task = built(name)
    (batch,) = batches(task, len(SIZES), **VIEWS)
    alone = [sample for one in batches(task, 1, **VIEWS) for sample in model.predict(one)]
    check_same(model.predict(batch), alone, task)


SEGMENTORS = [name for name in DENSE if HEADS[name]["_tasks_"] == ["segmentation"]]


@pytest.mark.parametrize("name", rest_slow(SEGMENTORS))
@torch.no_grad()
def test_windows_over_several_sizes(name, one_thread):
    model, task = built(name, **WINDOWS)
    (batch,) = batches(task, len(SIZES))
    singles = batches(task, 1)
    alone = [sample for one in singles for sample in model.predict(copy.deepcopy(one))]
    check_same(model.predict(batch), alone, task)
    # The toolkit's own, of an image that needs no padding: Mask2Former's head takes none.
    model.model.data_preprocessor.test_cfg = None
    (found,) = model.model.test_step(singles[0])
    assert torch.equal(found.seg_logits.data, alone[0].seg_logits.data)
