"""From what a backbone gives for an image to its classes; a host may bring a classifier of its own.

Axes: B images, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.init import init_linear


class Classifier(nn.Linear):
    """One linear layer on an embedding, and its cross entropy.

    A subclass may read something else than an embedding, whatever its backbone's ``features``
    gives, and have further layers and losses.

    Args:
        dim: C.
        num_classes: K.
        drop: Dropout before the linear layer.

    Shape: (B, C) -> (B, K).
    """

    def __init__(self, dim: int, num_classes: int, drop: float = 0.0) -> None:
        super().__init__(dim, num_classes)
        self.drop = nn.Dropout(drop)
        init_linear(self)

    def forward(self, features: Any) -> Tensor:
        """(B, C) -> logits (B, K)."""
        return super().forward(self.drop(features))

    def loss(self, features: Any, labels: Tensor, label_smoothing: float) -> dict[str, Tensor]:
        """Losses by name.

        Args:
            features: (B, C).
            labels: Indices (B,) or shares (B, K).
            label_smoothing: Share of the target spread over all classes.
        """
        logits = self(features)
        return {"loss_cls": F.cross_entropy(logits, labels, label_smoothing=label_smoothing)}
