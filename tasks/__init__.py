"""Task families: one folder per kind of problem, with its LightningModule."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbones.options.origins import check_packages

if TYPE_CHECKING:
    import torch

    from tasks.engine.base import BaseTask

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import a family's task on first use: with it come torch, lightning and timm."""
    if not name.startswith("_"):
        from tasks.engine.family import families, imported

        for family in families().values():
            if family.task.endswith(f".{name}"):
                return imported(family.task)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


check_packages("heads")
# Before a data module imports MMDetection, which without mmcv's operators loses its masks silently.
importlib.import_module("heads")


def load(run: str | Path, *, device: str | torch.device = "cpu") -> BaseTask:
    """Load a trained network: ``load("<run folder>").predict(images)``.

    Network, preprocessing and classes are the run's; its data set may be absent. With
    ``task.ema`` the weights are the average, as in evaluation.

    Args:
        run: Run folder, whose best checkpoint is loaded, a checkpoint of a task, or a model folder
            of ``export.py to=hub``: ``hf-hub:owner/name@revision`` or ``local-dir:FOLDER``.
        device: Where to predict, such as "cuda".

    Raises:
        ValueError: The folder is incomplete, or the file lacks the config of its task.

    >>> task = load("outputs/latest")
    >>> [row["input"] for row in task.predict(["photo.png"])]
    ['photo.png']
    """
    from tasks.engine.quick_imports import quick_imports

    with quick_imports():
        from tasks.engine.loading import load_run  # with it come torch, lightning and timm

        return load_run(run, device)
