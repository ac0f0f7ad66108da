"""A denoiser as one graph: one step's prediction from noisy images, times and labels.

It takes images or latents (B, C, H, W), times (B,) from 0 to 1000 and labels (B,), where K stands
for an unknown class. The batch is free. The sampler stays with the user; its options are facts of
the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.graphs import Axes, NetworkGraph

BATCHES = (2, 1, 5)  # of the comparison


class Step(nn.Module):
    """Prediction of a denoiser as one tensor."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction: (B, C, H, W), (B,) and (B,) -> (B, C or 2 C, H, W)."""
        prediction: Tensor = self.backbone(images, times, labels)[0]
        return prediction


def describe_graph(task: Any, network: Any, folder: Path, label: str) -> NetworkGraph:
    """Return the graph of a task's denoiser."""
    backbone, classes = network.backbone, list(task.class_names)
    shape = [backbone.channels, *backbone.img_size]

    def trials(axes: Axes) -> Sequence[tuple[Tensor, ...]]:
        return [_inputs(shape, len(classes), batch) for batch in BATCHES]

    def readme(file: str, axes: Sequence[str]) -> str:
        return (
            f"`{file}` takes noisy `images` (B, {', '.join(map(str, shape))}) as float32, `times` "
            f"(B,) from 0 to 1000 as float32 and `labels` (B,) as int64, where {len(classes)} is "
            "an unknown class. It returns `prediction`: one step's prediction. The metadata has "
            "the options of the sampler and the names of the classes.\n"
        )

    return NetworkGraph(
        Step(backbone).eval(),
        name="denoiser",
        inputs=("images", "times", "labels"),
        output="prediction",
        axes=({0: ("batch", 1, None)},),
        trials=trials,
        entry="sampling",
        facts={**network.sampling, "shape": shape, "classes": classes},
        readme=readme,
    )


def _inputs(shape: Sequence[int], count: int, batch: int) -> tuple[Tensor, ...]:
    """Return inputs for the comparison, the last label unknown."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *shape, generator=generator)
    labels = torch.arange(count + 1).flip(0)[torch.arange(batch) % (count + 1)]
    return images, torch.linspace(0, 999, batch), labels
