"""A segmentor as one graph: bytes of images to labels and their probabilities."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.toolkits.graphs import LabelMaps, image_bytes, image_groups, prepared_facts
from tasks.engine.graphs import NotWholeError, WholeGraph


class WholeSegmentor(WholeGraph):
    """Normalisation, padding, network and the labels at the images' own size."""

    inputs = ("images", "size")
    outputs = ("labels", "probabilities")
    script = Path(__file__).with_name("infer.py")

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        if task.data.bands is not None:
            raise NotWholeError("images of bands need this package's decoder")
        try:
            self.network = LabelMaps(self.network)
        except ValueError as error:
            raise NotWholeError(str(error)) from error

    def forward(self, images: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Label images (B, H, W, 3) at ``size`` (2,)."""
        labels, probabilities = self.network(images, size)
        return labels, probabilities

    def groups(self, batch: Any) -> Sequence[Any]:
        """Divide a batch by the sizes of its images, resized and original."""
        return image_groups(batch, "ori_shape")

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the images and their original height and width."""
        return image_bytes(batch), torch.tensor(batch["data_samples"][0].metainfo["ori_shape"][:2])

    def predictions(self, predicted: list[Any], answers: Sequence[Tensor]) -> list[Any]:
        """Return the samples with the graph's labels."""
        samples = [copy.deepcopy(sample) for sample in predicted]
        for sample, labels in zip(samples, answers[0], strict=True):
            sample.pred_sem_seg.data = labels.long()[None]
        return samples

    def differences(self, predicted: list[Any], answers: Sequence[Tensor]) -> Tensor:
        """Return per pixel how far the graph's label and probability are from the best one."""
        shares = torch.stack([sample.seg_logits.data.float().softmax(0) for sample in predicted])
        best, labels = shares.amax(1), answers[0].long()[:, None]
        share = shares.gather(1, labels)[:, 0]
        return torch.maximum(best - share, (best - answers[1]).abs()).flatten()

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes and how images are prepared."""
        return prepared_facts(task)
