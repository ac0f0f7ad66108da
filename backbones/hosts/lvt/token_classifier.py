"""Classifier of LVT on the class token and on all other tokens.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.10858.

Axes: B images, N tokens, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from backbones.hosts.lvt.mix_token import Tokens
from backbones.layers.classifier import Classifier
from backbones.layers.init import init_linear

AUX_WEIGHT = 0.5  # weight of all tokens but the class token, in the logits and in the loss


class TokenClassifier(Classifier):
    """Logits of the class token plus half the largest of all other tokens, per class.

    Its losses are in ``heads.losses``.

    Args:
        dim: C.
        num_classes: K.
        drop: Dropout before both linear layers.

    Shape: ``Tokens`` of (B, 1 + N, C) -> (B, K).
    """

    def __init__(self, dim: int, num_classes: int, drop: float = 0.0) -> None:
        super().__init__(dim, num_classes, drop)
        self.aux = nn.Linear(dim, num_classes)
        init_linear(self.aux)

    def outputs(self, features: Tokens) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token (B, K) and of all others (B, N, K)."""
        token, tokens = features.tokens[:, 0], features.tokens[:, 1:]
        return super().forward(token), self.aux(self.drop(tokens))

    def forward(self, features: Any) -> Tensor:
        """Return logits (B, K) of ``Tokens`` (B, 1 + N, C)."""
        logits, token_logits = self.outputs(features)
        return logits + AUX_WEIGHT * token_logits.amax(dim=1)
