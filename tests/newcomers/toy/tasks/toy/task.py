"""Regression of a number from a signal, by mean absolute error."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

from tasks.engine.base import BaseTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.toy.family import FAMILY

WIDTH, HEIGHT = 256, 80  # of a picture


class NumberTask(BaseTask):
    """Squared error in training, mean absolute error in evaluation."""

    family = FAMILY
    headline = ("mae",)
    metric_stores = ("error",)
    preview_images = 4

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.error = MeanAbsoluteError()

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Update the mean with a batch."""
        self.error.update(predictions.float(), batch["number"])

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the mean absolute error."""
        return {"mae": self.error.compute()}

    def reset_metrics(self) -> None:
        """Reset the mean."""
        self.error.reset()

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the sum of squared errors and their number."""
        errors = (predictions.float() - batch["number"]).square()
        return errors.sum(), torch.tensor(len(errors), device=errors.device)

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return ``input``, the signal's name, and ``number`` of each signal."""
        names = input_names(batch, datamodule, self.family.modality)
        numbers = self.model.predict(batch).tolist()
        return [
            {"input": name, "number": round(one, 4)}
            for name, one in zip(names, numbers, strict=True)
        ]

    def answer(self, row: Row) -> str:
        """Return the number in words."""
        return f"{row['number']:.3f}"

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw each signal with the predicted and the right number."""
        pictures = []
        for signal, guess, right in zip(
            batch["signal"], self.model.predict(batch).tolist(), batch["number"].tolist(),
            strict=True,
        ):  # fmt: skip
            picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
            draw = ImageDraw.Draw(picture)
            steps = len(signal[0]) - 1
            draw.line(
                [
                    (index * WIDTH / steps, (1 - value / 2) * HEIGHT / 2)
                    for index, value in enumerate(signal[0].tolist())
                ],
                fill="navy",
            )
            draw.text((4, 2), f"{guess:.2f} ({right:.2f})", fill="black")
            pictures.append(picture)
        return pictures
