"""Prediction of words: masked ones by BERT, the next ones by GPT.

Source: Devlin et al., "BERT", NAACL 2019, Sec. 3.1 and App. A.1; Radford et al., "Improving
Language Understanding by Generative Pre-Training", 2018, Eq. 1 and 2.

Axes: B texts, L tokens, C channels, V words, n predicted tokens of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.bert import WORD_HEAD
from backbones.layers.precision import at_least_float32
from backbones.options import Remembering
from heads.global_mean import global_mean
from heads.text import check_text

logger = logging.getLogger(__name__)

TARGETS = ("LanguageModel",)
NAMES = frozenset(WORD_HEAD.values())
EPS = 1e-12  # of the norm


class LanguageModel(Remembering, nn.Module):
    """Encoder of text whose outputs are compared with the embeddings of all words.

    Of BERT the outputs at masked tokens go through a linear layer, GELU and a norm, and each word
    has a bias. Of GPT, whose tokens see earlier ones alone, each output predicts the next token.

    Args:
        backbone: A host for text.
        num_classes: 0; data modules of labelled texts give more, and are refused.

    Shape: tokens (B, L) -> logits (B, L, V).

    Raises:
        ValueError: Another backbone, or classes.
    """

    training_notes = ("the output layer is the embedding of words, whose rate and freezing it has",)

    def __init__(self, backbone: Backbone, num_classes: int = 0) -> None:
        super().__init__()
        if num_classes:
            raise ValueError(
                "protocol=mlm pretrains on plain text: pass data=text_file data.root=<text file>, "
                "or leave protocol=mlm out to train on labelled texts"
            )
        self.backbone = check_text(backbone)
        dim, words = self.backbone.num_features, self.backbone.words.num_embeddings
        self.transform: nn.Module = nn.Identity()
        self.bias: nn.Parameter | None = None
        if not self.backbone.causal:
            linear = nn.Linear(dim, dim)
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.transform = nn.Sequential(linear, nn.GELU(), nn.LayerNorm(dim, eps=EPS))
            self.bias = nn.Parameter(torch.zeros(words))
            if self.backbone.pooler is not None:
                self.backbone.pooler.requires_grad_(False)  # unused
            self._take_word_head()

    def _take_word_head(self) -> None:
        """Load the head of words that the backbone's file had, and say whether it was complete."""
        word_head = self.backbone.word_head
        state = {name: value for name, value in self.state_dict().items() if name in NAMES}
        if {name: value.shape for name, value in word_head.items()} == {
            name: value.shape for name, value in state.items()
        }:
            self.load_state_dict(word_head, strict=False)
            logger.info("the head of words comes from the pretrained file, too")
        elif word_head:
            logger.warning(
                "the head of words in the pretrained file is incomplete or of another size; it "
                "starts from random weights"
            )
        self.backbone.word_head = {}

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Compare each output with all words: (B, L) -> (B, L, V)."""
        return self.compare(self.backbone.encode(tokens, segments, mask))

    def compare(self, x: Tensor) -> Tensor:
        """Compare outputs with all words: (..., C) -> (..., V)."""
        return F.linear(self.transform(x), self.backbone.words.weight, self.bias)

    def predicted(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the places of the outputs and of the words that they predict, two of (B, L)."""
        if not self.backbone.causal:
            return batch["chosen"], batch["chosen"]
        words = batch["mask"].clone()
        words[:, 0] = False
        return words.roll(-1, 1), words

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of the predicted words, which is 0 without any."""
        losses = self.losses(self._logits(batch), batch)
        return {"loss_words": global_mean(losses.sum(), losses.new_full((), len(losses)))}

    def losses(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each predicted word: (n, V) -> (n,)."""
        words = batch["tokens"][self.predicted(batch)[1]]
        return F.cross_entropy(at_least_float32(logits), words.long(), reduction="none")

    def answers(self, batch: Mapping[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return guessed and true words, and their groups: three of (n,)."""
        words = batch["tokens"][self.predicted(batch)[1]]
        return logits.argmax(1), words, torch.zeros_like(words)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of all predicted words of the batch (n, V)."""
        return self._logits(batch)

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["tokens" if self.backbone.causal else "masked"]
        x = self.backbone.encode(tokens, batch["segments"], batch["mask"])
        return self.compare(x[self.predicted(batch)[0]])
