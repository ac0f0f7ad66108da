"""What all tasks make of images without labels: rows, answers and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from PIL import Image

from tasks.batches import Batch, Row

UNREADABLE = "unreadable"  # key of the reason in a row of an image that cannot be read


class Prediction(LightningModule):
    """The part of a ``BaseTask`` that predicts; the attributes are the task's own."""

    data: Any

    @torch.no_grad()
    def predict(self, images: Any) -> list[Row]:
        """Predict images, prepared as in evaluation: of a task from ``tasks.load``.

        An image gets the prediction that it gets alone. Several threads may call at the same time.

        Args:
            images: One image or a list of them: paths (of a folder, all its images), PIL images,
                uint8 arrays (H, W, 3) of RGB values or uint8 tensors (3, H, W).

        Returns:
            A dict for each image, as in predictions.json; see the tasks' ``describe``.
        """
        if self.data is None:
            raise ValueError("predict() is for tasks from tasks.load(<run folder>)")
        self.eval()
        data = self.data.serving(images)
        rows: list[Row] = []
        for batch in data.predict_dataloader():
            for broken in batch.pop("unreadable", ()):
                raise ValueError(broken.reason)
            placed = self.transfer_batch_to_device(batch, self.device, 0)
            rows += self.describe(placed, data)
        return rows

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Row]:
        """Predictions of a batch of the trainer's datamodule; arrays go to files of the run."""
        trainer: Any = self.trainer
        broken = batch.pop("unreadable", ())
        described = self.describe(batch, trainer.datamodule) if batch else []
        rows = [self.filed(row) for row in described]
        return rows + [{"image": one.name, UNREADABLE: one.reason} for one in broken]

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Predictions as plain values, one dict per image."""
        raise NotImplementedError

    def filed(self, row: Row) -> Row:
        """A row of ``describe`` as json takes it."""
        return row

    def answer(self, row: Row) -> str:
        """A row of ``describe`` in words, for the terminal."""
        raise NotImplementedError

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions as other tools read them, beside predictions.json."""

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the predictions for a batch of the datamodule, which says what drawing has to know.

        That is ``normalisation``, the mean and deviation of its images, or ``background``, the
        class that is not tinted.
        """
        raise NotImplementedError
