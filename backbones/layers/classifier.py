"""From what a backbone gives for an image to its classes; a host may bring a classifier of its own.

Axes: B images, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from backbones.layers.init import init_linear


class Classifier(nn.Linear):
    """Logits from an embedding by one linear layer, after dropout.

    A subclass may read something else than an embedding, whatever its backbone's ``features``
    gives, and have further layers. What trains it is said in ``heads.losses``.

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
        """W dropout(x) + b: (B, C) -> logits (B, K)."""
        return super().forward(self.drop(features))
