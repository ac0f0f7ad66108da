"""Features of all images of a loader by a frozen backbone, in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from heads.frozen.features import Features
from tasks.engine.loops.process_exchange import gather_objects

Step = Callable[[Any], Any]


class FeatureExtraction(LightningModule):
    """Collect the features of each image of a test loader.

    Args:
        model: Maps images (B, 3, H, W) to features (B, D).
        loader: Function that builds the loader, called once the run's processes are known.
        normalise: The datamodule's ``normalise``.
    """

    def __init__(
        self, model: nn.Module, loader: Callable[[], DataLoader[Any]], normalise: Step
    ) -> None:
        super().__init__()
        self.model, self._loader, self._normalise = model, loader, normalise
        self._collected: list[tuple[Tensor, Tensor, Tensor]] = []

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this process's images."""
        return self._loader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise a batch on its device, in the type of the precision."""
        return self.trainer.precision_plugin.convert_input(self._normalise(batch))

    def on_test_start(self) -> None:
        """Clear the collected features."""
        self._collected = []

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect the features, labels and sample ids of a batch."""
        values = self.model(batch["image"]).float()
        tensors = (values, batch["label"], batch["sample_id"])
        # Copies, as each tensor of a worker keeps a file open.
        self._collected.append(tuple(tensor.detach().cpu().clone() for tensor in tensors))  # type: ignore[arg-type]

    def features(self, count: int) -> Features:
        """Return the rows of all processes, each image once, in order.

        Args:
            count: Number of images in the data set.

        Raises:
            ValueError: Images were skipped.
        """
        blank = (torch.empty(0), *(torch.empty(0, dtype=torch.int64) for _ in range(2)))
        local_features = (
            tuple(map(torch.cat, zip(*self._collected, strict=True))) if self._collected else blank
        )
        parts = [part for part in gather_objects(local_features) if len(part[0])]
        values, labels, numbers = map(torch.cat, zip(*parts, strict=True))
        order = numbers.argsort()
        if not torch.equal(numbers[order], torch.arange(count)):
            raise ValueError(
                f"features of {len(numbers.unique())} of {count} images were extracted, but all "
                "are needed; leave trainer.limit_val_batches and trainer.fast_dev_run out"
            )
        return Features(values[order], labels[order])


def extract(
    trainer: Trainer,
    model: nn.Module,
    loader: Callable[[], DataLoader[Any]],
    normalise: Step,
    count: int,
) -> Features:
    """Extract the features of all images; all processes return the same.

    Args:
        trainer: Trainer with the device, precision and processes to use.
        model: See ``FeatureExtraction``.
        loader: Function that builds the loader of a process's share, with ``image``, ``label`` and
            ``sample_id``.
        normalise: See ``FeatureExtraction``.
        count: Number of images in the data set.
    """
    module = FeatureExtraction(model, loader, normalise)
    trainer.test(module, verbose=False)
    return module.features(count)
