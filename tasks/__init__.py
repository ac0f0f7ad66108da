"""One LightningModule per kind of problem; what it trains and on which data is handed in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backbones.options.origins import check_packages

if TYPE_CHECKING:
    import torch

    from tasks.base import BaseTask

__all__ = ["load"]

check_packages("heads")


def load(run: str | Path, *, device: str | torch.device = "cpu") -> BaseTask:
    """The network of a training run, to predict with: ``load("<run folder>").predict(images)``.

    Network, preprocessing and classes are those of the run; its data set is not needed. With an
    average (``task.ema``) the weights are the average, as in evaluation.

    Args:
        run: Run folder, of which the best checkpoint is taken, or one of its checkpoints.
        device: Where to predict, such as "cuda".

    Raises:
        ValueError: No run folder, or one that is not whole.
    """
    from tasks.loading import load_run  # with it come torch, lightning and timm

    return load_run(run, device)
