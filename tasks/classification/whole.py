"""A classifier as one graph: bytes of images to probabilities and logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.graphs import NotWholeError, WholeGraph, distance

LARGEST_BYTE = 255


class WholeClassifier(WholeGraph):
    """Normalisation, network, temperature and softmax.

    Shape: (B, H, W, 3) of bytes in RGB -> probabilities and logits (B, K).
    """

    outputs = ("probabilities", "logits")
    script = Path(__file__).with_name("infer.py")

    mean: Tensor
    std: Tensor

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        if task.data.bands is not None:
            raise NotWholeError("images of bands need this package's decoder")
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in task.data.normalisation)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.temperature = task.temperature

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Classify images (B, H, W, 3)."""
        scaled = images.permute(0, 3, 1, 2).float() / LARGEST_BYTE
        logits = self.network((scaled - self.mean) / self.std)
        return self.probabilities(logits), logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits (B, K)."""
        return (logits / self.temperature).softmax(-1)

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the bytes (B, H, W, 3)."""
        if batch["image"].dtype != torch.uint8:
            raise NotWholeError("this augmentation normalises images itself")
        return (batch["image"].permute(0, 2, 3, 1).contiguous(),)

    def predictions(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the logits."""
        return answers[1]

    def differences(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the differences of probabilities and logits."""
        shares = self.probabilities(predicted.float())
        return torch.cat([distance(shares, answers[0]), distance(predicted, answers[1])])

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes and the temperature."""
        return {"classes": list(task.class_names), "temperature": self.temperature}
