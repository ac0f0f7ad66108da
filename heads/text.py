"""Classes or a score of texts: dropout and a linear layer over the embedding; masked words.

Axes: B texts, L tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.bert import TextEncoder
from backbones.options import Remembering

TARGETS = ("TextClassifier",)


class TextClassifier(Remembering, nn.Module):
    """Encoder of text with a linear layer to classes, or to one score.

    Args:
        backbone: A host for text.
        num_classes: K; 1 predicts a score by squared error.
        drop: Dropout before the layer.

    Shape: tokens (B, L) -> logits (B, K).

    Raises:
        ValueError: Another backbone.
    """

    def __init__(self, backbone: Backbone, num_classes: int, *, drop: float = 0.1) -> None:
        super().__init__()
        if not isinstance(backbone, TextEncoder):
            raise ValueError(
                f"{backbone.name or type(backbone).__name__} takes no text; pass a host such as "
                "bert_tiny"
            )
        self.backbone: TextEncoder = backbone
        self.num_classes = num_classes
        self.drop = nn.Dropout(drop)
        self.classifier = nn.Linear(backbone.num_features, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Classify texts: (B, L) -> (B, K)."""
        return self.classifier(self.drop(self.backbone.embed(tokens, segments, mask)))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each text: (B, K) and (B,) -> (B,)."""
        if self.num_classes == 1:
            return (logits.squeeze(1).float() - labels.float()).square()
        return F.cross_entropy(logits.float(), labels.long(), reduction="none")

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of ``tokens``, ``segments`` and ``mask`` with ``labels``."""
        name = "loss_mse" if self.num_classes == 1 else "loss_ce"
        return {name: self.losses(self._logits(batch), batch["labels"]).mean()}

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits, or scores (B, 1)."""
        return self._logits(batch)

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self(batch["tokens"], batch["segments"], batch["mask"])
