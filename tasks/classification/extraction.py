"""A frozen backbone's features of all images of a loader, in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from heads.frozen.features import Features
from tasks.engine.gather import gather_objects


class FeatureExtraction(LightningModule):
    """Keep what a network makes of each image of a test loader.

    Args:
        model: Maps images (B, 3, H, W) to features (B, D).
        loader: Makes the loader, once the processes of the run are known.
    """

    def __init__(self, model: nn.Module, loader: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.model, self._loader = model, loader
        self._taken: list[tuple[Tensor, Tensor, Tensor]] = []

    def test_dataloader(self) -> DataLoader[Any]:
        """The images of this process."""
        return self._loader()

    def on_test_start(self) -> None:
        """Forget what was taken before."""
        self._taken = []

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Take the features of a batch, its labels and which images they are."""
        values = self.model(batch["image"]).float()
        taken = (values, batch["label"], batch["sample_id"])
        self._taken.append(tuple(part.detach().cpu() for part in taken))  # type: ignore[arg-type]

    def features(self, count: int) -> Features:
        """Return the rows of all processes, each image once, in order.

        Args:
            count: Images of the data set.

        Raises:
            ValueError: Images were left out.
        """
        empty = (torch.empty(0), *(torch.empty(0, dtype=torch.int64) for _ in range(2)))
        own = tuple(map(torch.cat, zip(*self._taken, strict=True))) if self._taken else empty
        parts = [part for part in gather_objects(own) if len(part[0])]
        values, labels, numbers = map(torch.cat, zip(*parts, strict=True))
        order = numbers.argsort()
        if not torch.equal(numbers[order], torch.arange(count)):
            raise ValueError(
                f"features of {len(numbers.unique())} of {count} images were taken, and all are "
                "needed; leave trainer.limit_val_batches and trainer.fast_dev_run out"
            )
        return Features(values[order], labels[order])


def extract(
    trainer: Trainer, model: nn.Module, loader: Callable[[], DataLoader[Any]], count: int
) -> Features:
    """Return the features of all images, the same in all processes.

    Args:
        trainer: Its device, precision and processes are used.
        model: See ``FeatureExtraction``.
        loader: Makes one of ``image``, ``label`` and ``sample_id``, of a process's share of images.
        count: Images of the data set.
    """
    module = FeatureExtraction(model, loader)
    trainer.test(module, verbose=False)
    return module.features(count)
