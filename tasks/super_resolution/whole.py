"""An enlarging network as one graph: images from 0 to 1 to enlarged ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.graphs import NotWholeError, WholeGraph, distance

LARGEST_BYTE = 255


class WholeSuperResolution(WholeGraph):
    """The network, and the order of the axes.

    Shape: (B, H, W, 3) from 0 to 1 in RGB -> (B, r H, r W, 3), which may leave this range.
    """

    outputs = ("enlarged",)
    script = Path(__file__).with_name("infer.py")

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        if self.network.host.radius is None:
            height, width = self.network.host.img_size
            raise NotWholeError(
                f"this network enlarges parts of {height}x{width} pixels, one graph whole images"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Enlarge images (B, H, W, 3)."""
        enlarged: Tensor = self.network(images.permute(0, 3, 1, 2))
        return enlarged.permute(0, 2, 3, 1)

    def groups(self, batch: Any) -> Sequence[Any]:
        """Return a batch per image, as images differ in size."""
        return [
            {name: values[place : place + 1] for name, values in batch.items()}
            for place in range(len(batch["low"]))
        ]

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the image from 0 to 1."""
        low = batch["low"][0].permute(1, 2, 0)[None].contiguous()
        return (low.float() / LARGEST_BYTE if low.dtype == torch.uint8 else low,)

    def predictions(self, predicted: list[Tensor], answers: Sequence[Tensor]) -> list[Tensor]:
        """Return the image (3, r H, r W)."""
        return list(answers[0].permute(0, 3, 1, 2))

    def differences(self, predicted: list[Tensor], answers: Sequence[Tensor]) -> Tensor:
        """Return the differences of the values."""
        return distance(torch.stack(predicted), answers[0].permute(0, 3, 1, 2))

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the factor of the enlargement."""
        return {"scale": task.scale}
