"""Classifier of networks with a class token and a distillation token.

Source: Touvron et al., "Training data-efficient image transformers", ICML 2021,
https://arxiv.org/abs/2012.12877, Sec. 4.

Axes: B images, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from backbones.layers.classifier import Classifier
from backbones.layers.init import init_linear


class TwoTokenClassifier(Classifier):
    """Classifier that averages the logits of both tokens; each token has its own linear layer.

    Its losses are in ``heads.losses``.

    Args:
        dim: C.
        num_classes: K.
        drop: Dropout before both linear layers.

    Shape: (B, 2, C), the class token first -> (B, K).
    """

    def __init__(self, dim: int, num_classes: int, drop: float = 0.0) -> None:
        super().__init__(dim, num_classes, drop)
        self.dist = nn.Linear(dim, num_classes)
        init_linear(self.dist)

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the class token and of the distillation token, both (B, K)."""
        return super().forward(features[:, 0]), self.dist(self.drop(features[:, 1]))

    def forward(self, features: Any) -> Tensor:
        """Return the mean of both logits: (B, 2, C) -> (B, K)."""
        logits, distilled = self.outputs(features)
        return (logits + distilled) / 2
