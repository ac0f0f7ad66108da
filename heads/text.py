"""Classes or a score of texts: dropout and a linear layer over the embedding.

Axes: B texts, L tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.bert import TextEncoder
from backbones.layers.precision import at_least_float32
from backbones.options import Remembering
from heads.host_check import check_host

TARGETS = ("TextClassifier",)


class TextClassifier(Remembering, nn.Module):
    """Encoder of text with a linear layer to classes, or to one score.

    Args:
        backbone: A host for text.
        num_classes: K; 1 predicts a score by squared error.
        drop: Dropout before the layer.
        words_weight: Weight of the loss of next words in training, for causal hosts; 0.5 in GPT-1.

    Shape: tokens (B, L) -> logits (B, K).

    Raises:
        ValueError: Another backbone, data without classes, or ``words_weight`` for BERT.
    """

    def __init__(
        self, backbone: Backbone, num_classes: int, *, drop: float = 0.1, words_weight: float = 0.0
    ) -> None:
        super().__init__()
        self.backbone = check_text(backbone)
        if num_classes < 1:
            raise ValueError(
                "plain text has no labels: pass protocol=mlm to pretrain on it, or a set of GLUE "
                "such as data=cola"
            )
        if words_weight and not self.backbone.causal:
            raise ValueError(
                f"head.words_weight={words_weight} is for causal hosts such as gpt1; "
                f"{backbone.name} sees later words, so pass head.words_weight=0"
            )
        self.num_classes, self.words_weight = num_classes, words_weight
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
            return (at_least_float32(logits.squeeze(1)) - labels).square()
        return F.cross_entropy(at_least_float32(logits), labels.long(), reduction="none")

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of ``tokens``, ``segments`` and ``mask`` with ``labels``.

        Pairs in both orders add ``tokens_swapped`` and so on.
        """
        name = "loss_mse" if self.num_classes == 1 else "loss_ce"
        logits, x, texts = self._classify(batch)
        losses = {name: self.losses(logits, batch["labels"]).mean()}
        if self.words_weight:
            losses["loss_words"] = self.words_weight * self._next_words(x, texts)
        return losses

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits, or scores (B, 1)."""
        return self._classify(batch)[0]

    def answers(self, batch: Mapping[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return guesses, labels and groups of the texts: three of (B,)."""
        guesses = logits.squeeze(1) if self.num_classes == 1 else logits.argmax(1)
        return guesses, batch["labels"], batch["group"]

    def _classify(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return logits, the encoder's outputs, and the texts that it read."""
        texts: Mapping[str, Tensor] = batch
        if "tokens_swapped" in batch:
            names = ("tokens", "segments", "mask")
            texts = {name: torch.cat([batch[name], batch[f"{name}_swapped"]]) for name in names}
        x = self.backbone.encode(texts["tokens"], texts["segments"], texts["mask"])
        pooled = self.backbone.pool(x, texts["mask"])
        count = len(batch["tokens"])
        if len(pooled) > count:
            pooled = pooled[:count] + pooled[count:]
        return self.classifier(self.drop(pooled)), x, texts

    def _next_words(self, x: Tensor, texts: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over texts of the mean loss of each next word (GPT-1, Eq. 5)."""
        real = texts["mask"][:, 1:]
        logits = at_least_float32(F.linear(x[:, :-1], self.backbone.words.weight)[real])
        losses = torch.zeros_like(real, dtype=logits.dtype)
        losses[real] = F.cross_entropy(logits, texts["tokens"][:, 1:][real], reduction="none")
        return (losses.sum(1) / real.sum(1).clamp(min=1)).mean()


def check_text(backbone: Backbone) -> TextEncoder:
    """Return a backbone that takes text.

    Raises:
        ValueError: Another backbone.
    """
    check_host(backbone, TextEncoder, "read text", "bert_tiny")
    return cast("TextEncoder", backbone)
