"""The dense heads of configs/head, built small, and images of several sizes to predict."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from datamodules import SampleDetection, SampleSegmentation
from tasks.engine.instantiate import build
from tests.families import short
from tests.runs import CONFIGS, options

TOOLKITS = {"detection": "mmdet", "segmentation": "mmseg"}
KINDS = {"detection": SampleDetection, "segmentation": SampleSegmentation}
# What keeps heads small; see configs/data/sample_*.yaml.
FEW = {
    "detection": {"num_rois": 16, "num_proposals": 30, "group_norm": True},
    "segmentation": {"channels": 64, "group_norm": True},
}
# Narrow layers and few masks, which take the longest.
NARROW = {
    "mask_rcnn": {"bbox_head.fc_out_channels": 32, "mask_head.num_convs": 1},
    "cascade_mask_rcnn": {f"bbox_head.{stage}.fc_out_channels": 32 for stage in range(3)},
}
# (W, H); padded to multiples of 32 the first and the third have one size.
SIZES = ((64, 64), (64, 30), (48, 64), (30, 64))
CLASSES = tuple("abcdefghij")


def read(name):
    return yaml.safe_load((CONFIGS / "head" / f"{name}.yaml").read_text())


HEADS = {name: read(name) for name in options("head")}
DENSE = [name for name, head in HEADS.items() if set(head["_tasks_"]) & set(TOOLKITS)]


def task_of(name):
    (task,) = HEADS[name]["_tasks_"]
    return task


def model_of(head, backbone, num_classes, **more):
    (task,) = head["_tasks_"]
    pytest.importorskip(TOOLKITS[task])
    config = {key: value for key, value in head.items() if key != "_tasks_"} | more
    return build(config, "head", backbone=backbone, num_classes=num_classes)


def small_model(name, backbone="swin_t", **more):
    """A head on a short backbone, in evaluation mode, that finds something in any image."""
    torch.manual_seed(0)
    values = {f"roi_head.{key}": value for key, value in NARROW.get(name, {}).items()}
    if "mask_rcnn" in name:
        values["test_cfg.rcnn.max_per_img"] = 12
    given = FEW[task_of(name)] | {"options": values} | more
    model = model_of(HEADS[name], short(backbone, dense=True), len(CLASSES), **given)
    for key, parameter in model.named_parameters():
        if key.endswith("retina_cls.bias"):
            parameter.data.fill_(-1.0)
    return model.eval()


def pictures():
    """One image of each size."""
    generator = np.random.default_rng(0)
    drawn = [
        generator.integers(0, 255, (height // 6, width // 6, 3), dtype=np.uint8)
        for width, height in SIZES
    ]
    return [
        Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
        for small, size in zip(drawn, SIZES, strict=True)
    ]


def serving_data(task, batch_size, **more):
    """A datamodule that prepares images to predict, at their own size."""
    data = KINDS[task](num_workers=0, scale=64, eval_batch_size=batch_size, **more)
    data.predict_only(CLASSES, range(1, 11))
    return data
