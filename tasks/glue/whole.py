"""A text network as one graph: numbers of a text's pieces to probabilities or a score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.text import TextClassifier
from tasks.engine.graphs import NotWholeError, WholeGraph, distance

TEXT = ("tokens", "segments", "mask")


class WholeTexts(WholeGraph):
    """Encoder, head and softmax.

    Shape: three of (B, L) -> (B, K), or scores (B, 1).
    """

    inputs = TEXT
    outputs = ("probabilities", "logits")
    script = Path(__file__).with_name("infer.py")

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__(task, network)
        blocks = self.network.backbone.blocks.children()
        reasons = {
            "a language model lacks classes": not isinstance(network, TextClassifier),
            "its mixers read padding": any(block.by_length for block in blocks),
            "it takes each pair in both orders": getattr(task.data, "swaps", False),
        }
        for reason, holds in reasons.items():
            if holds:
                raise NotWholeError(reason)
        self.tokenizer = task.data.tokenizer()
        if not hasattr(self.tokenizer, "pieces"):
            raise NotWholeError("infer.py lacks the byte pairs of GPT-1")
        most = task.data.max_tokens
        self.axes = ({0: ("batch", 1, None), 1: ("length", 3, most)},)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Classify texts."""
        logits = self.network(tokens, segments, mask)
        return self.probabilities(logits), logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (B, K), or scores (B, 1) as they are."""
        return logits if self.network.num_classes == 1 else logits.softmax(-1)

    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the texts."""
        return tuple(batch[name] for name in TEXT)

    def predictions(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the logits."""
        return answers[1]

    def differences(self, predicted: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """Return the differences of probabilities and logits."""
        shares = self.probabilities(predicted)
        return torch.cat([distance(shares, answers[0]), distance(predicted, answers[1])])

    def facts(self, task: Any) -> dict[str, Any]:
        """Return classes and tokenizer."""
        tokenizer = self.tokenizer
        strips = tokenizer.lower if tokenizer.strip_accents is None else tokenizer.strip_accents
        return {
            "classes": list(task.class_names),
            "max_tokens": task.data.max_tokens,
            "lower": tokenizer.lower,
            "strip_accents": strips,
            "vocabulary": list(tokenizer.pieces),
        }
