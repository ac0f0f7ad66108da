"""How LVT is classified and trained: a class token, every token beside it, and MixToken.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021 (both losses, MixToken); Yun et al., "CutMix", ICCV 2019 (how the box is drawn).

Axes: B images, H W map, N tokens, C channels, K classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.classifier import Classifier
from backbones.layers.init import init_linear

AUX_WEIGHT = 0.5  # of the tokens beside the class token, in the logits and in the loss


class Box(NamedTuple):
    """Rows and columns of a map, first and one past the last."""

    top: int
    bottom: int
    left: int
    right: int


class Tokens(NamedTuple):
    """What the classifier reads.

    Attributes:
        tokens: (B, 1 + N, C), the class token first; the others each in their own image.
        own_share: How much of the map behind each class token was its own image's; the rest was
            that of the image in the mirrored place of the batch.
    """

    tokens: Tensor
    own_share: float = 1.0


class TokenClassifier(Classifier):
    """Logits of the class token plus half the largest of all other tokens', class by class.

    Trained without token labels, which a teacher network would have to make: every token has the
    label of its image. The loss is the class token's cross entropy, with labels in the shares of
    MixToken, plus half the mean of the tokens'.

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
        """Logits of the class token (B, K) and of all others (B, N, K)."""
        token, tokens = features.tokens[:, 0], features.tokens[:, 1:]
        return super().forward(token), self.aux(self.drop(tokens))

    def forward(self, features: Any) -> Tensor:
        """``Tokens`` of (B, 1 + N, C) -> logits (B, K)."""
        logits, token_logits = self.outputs(features)
        return logits + AUX_WEIGHT * token_logits.amax(dim=1)

    def loss(self, features: Tokens, labels: Tensor, label_smoothing: float) -> dict[str, Tensor]:
        """The sum of both by the name "loss_cls"; in training also its parts, to be logged.

        Args:
            features: Of (B, 1 + N, C).
            labels: Indices (B,) or shares (B, K).
            label_smoothing: Share of the targets spread over all classes.
        """
        if not self.training:
            return super().loss(features, labels, label_smoothing)
        logits, token_logits = self.outputs(features)
        cross_entropy = partial(F.cross_entropy, label_smoothing=label_smoothing)
        own = cross_entropy(logits, labels)
        if features.own_share < 1:
            other = cross_entropy(logits, labels.flip(0))
            own = features.own_share * own + (1 - features.own_share) * other
        each = labels[..., None].expand(*labels.shape, token_logits.shape[1])
        aux = cross_entropy(token_logits.transpose(1, 2), each)
        return {"loss_cls": own + AUX_WEIGHT * aux, "class_token": own, "tokens": aux}


def draw_box(size: tuple[int, int]) -> Box:
    """A random box in a map of (H, W), cut off at the map's borders, as CutMix draws it.

    Its area before that is uniform, its sides are rounded down to even numbers.
    """
    area, *centre = torch.rand(3).tolist()
    sides = []
    for length, place in zip(size, centre, strict=True):
        half = int(length * area**0.5) // 2
        middle = int(length * place)
        sides += [max(middle - half, 0), min(middle + half, length)]
    return Box(*sides)


def swap(x: Tensor, box: Box, unit: int = 1) -> Tensor:
    """Exchange a box of (B, H, W, C) with the image in the mirrored place of the batch.

    Args:
        x: (B, H, W, C).
        box: In units of ``unit`` positions.
        unit: See ``box``.
    """
    rows = slice(unit * box.top, unit * box.bottom)
    columns = slice(unit * box.left, unit * box.right)
    mixed = x.clone()
    mixed[:, rows, columns] = x[:, rows, columns].flip(0)
    return mixed


def own_share(box: Box, size: tuple[int, int]) -> float:
    """The share of a map of (H, W) outside a box."""
    return 1 - (box.bottom - box.top) * (box.right - box.left) / (size[0] * size[1])
