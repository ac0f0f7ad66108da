"""Requests of exports with networks of few blocks, and configs of runs that are exported."""

from dataclasses import dataclass
from pathlib import Path

from tests.families import shorten
from tools.exports import TARGETS, ExportRequest


@dataclass(frozen=True)
class SmallRequest(ExportRequest):
    """A request whose networks have two blocks where the real ones have many."""

    def build_backbone(self, *, dense):
        return shorten(super().build_backbone(dense=dense))


def small_request(name, to, folder, size=(64, 96), **settings):
    """Return an export request as the command makes it, for random weights."""
    settings = {**TARGETS[to].settings, **settings}
    return SmallRequest(to, name, {"img_size": size}, None, None, Path(folder), size, settings)


STATISTICS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.1]}
PAPER = {"crop_pct": 0.8, "interpolation": "bilinear", **STATISTICS}
AUGMENTATIONS = {
    "paper": {"_target_": "datamodules.images.transforms.PaperAugmentation", **PAPER},
    "light": {"_target_": "datamodules.images.transforms.LightAugmentation", **STATISTICS},
}


def run_config(augmentation, task="classification"):
    data = {
        "_target_": "datamodules.images.cifar100.CIFAR100DataModule",
        "root": None,
        "image_size": 64,
        "augmentation": augmentation,
    }
    backbone = {"name": "deit_t", "img_size": 64}
    head = {"_target_": "heads.linear.LinearClassifier"}
    return {"task_name": task, "seed": 0, "backbone": backbone, "data": data, "head": head,
            "task": {"_target_": "tasks.classification.task.ClassificationTask"}}  # fmt: skip
