"""Requests of exports with networks of few blocks, and configs of runs that are exported."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from backbones import Backbone, create_mixer
from backbones.base import FeatureInfo
from backbones.layers.graph_sizes import missing
from backbones.options import keywords
from backbones.registry import find_mixer
from tests.families import shorten
from tools.exports.requests import TARGETS, ExportRequest

DIM, STRIDE = 64, 16  # of ``MixerHost``


@dataclass(frozen=True)
class SmallRequest(ExportRequest):
    """A request whose networks have two blocks where the real ones have many."""

    def build_backbone(self, *, dense):
        return shorten(super().build_backbone(dense=dense))


def small_request(name, to, folder, size=(64, 96), **settings):
    """Return an export request as the command makes it, for random weights."""
    settings = {**TARGETS[to].settings, **settings}
    return SmallRequest(to, name, {"img_size": size}, None, None, Path(folder), size, settings)


class MixerHost(Backbone):
    """A patch embedding and one block of a mixer alone, or two blocks if it alternates."""

    def __init__(self, name, **options):
        super().__init__()
        self.feature_info, self.num_features = (FeatureInfo(DIM, STRIDE),), DIM
        self.patch = nn.Conv2d(3, DIM, STRIDE, STRIDE)
        blocks = (0, 1) if "slot" in keywords(find_mixer(name).build) else (0,)
        self.blocks = nn.ModuleList(
            create_mixer(name, DIM, grid=(4, 6), block=block, **options) for block in blocks
        )
        # Tables and last layers, which begin near zero, count as well.
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, images):
        """Mix patches: (B, 3, H, W) -> a map (B, C, h, w)."""
        below, right = (missing(side, STRIDE) for side in images.shape[2:])
        x = self.patch(F.pad(images, (0, right, 0, below))).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = x + block(x)
        return (x.permute(0, 3, 1, 2).contiguous(),)

    def embed(self, images):
        """Return the mean of the map: (B, 3, H, W) -> (B, C)."""
        return self.forward(images)[0].mean((2, 3))


@dataclass(frozen=True)
class MixerRequest(ExportRequest):
    """A request whose network is a ``MixerHost`` of the mixer ``backbone``."""

    def build_backbone(self, *, dense):
        return MixerHost(self.backbone).eval()


def mixer_request(name, to, folder, size=(64, 96)):
    """Return an export request for a mixer alone."""
    settings = {**TARGETS[to].settings, "what": "maps"}
    return MixerRequest(to, name, {"img_size": size}, None, None, Path(folder), size, settings)


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
