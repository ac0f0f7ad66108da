"""One LightningModule per kind of problem; what it trains and on which data is handed in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbones.options.origins import check_packages

if TYPE_CHECKING:
    import torch

    from tasks.classification.task import ClassificationTask
    from tasks.detection.task import DetectionTask
    from tasks.engine.base import BaseTask
    from tasks.segmentation.task import SegmentationTask

__all__ = ["ClassificationTask", "DetectionTask", "SegmentationTask", "load"]

HOMES = {
    "ClassificationTask": "tasks.classification.task",
    "DetectionTask": "tasks.detection.task",
    "SegmentationTask": "tasks.segmentation.task",
}


def __getattr__(name: str) -> Any:
    """Import a task when it is asked for: with it come torch, lightning and timm."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


check_packages("heads")


def load(run: str | Path, *, device: str | torch.device = "cpu") -> BaseTask:
    """The network of a training run, to predict with: ``load("<run folder>").predict(images)``.

    Network, preprocessing and classes are those of the run; its data set is not needed. With an
    average (``task.ema``) the weights are the average, as in evaluation.

    Args:
        run: Run folder, of which the best checkpoint is taken, or a checkpoint of a task, which
            need not lie in a run folder.
        device: Where to predict, such as "cuda".

    Raises:
        ValueError: A folder that is not whole, or a file that does not say what it is of.
    """
    from tasks.engine.loading import load_run  # with it come torch, lightning and timm

    return load_run(run, device)
