"""Linear classifier on the embedding of an image; a host may have its own.

Axes: B images, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from backbones.layers.init import init_linear


class Classifier(nn.Linear):
    """Logits from an embedding by one linear layer, after dropout.

    A subclass may read what else its backbone's ``features`` returns, and have further layers. Its
    losses are in ``heads.losses``.

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
        """Return W dropout(x) + b: (B, C) -> logits (B, K)."""
        return super().forward(self.drop(features))
