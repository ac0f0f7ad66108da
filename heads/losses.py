"""What classifiers are trained by: cross entropy, and more for those that give more than logits.

Axes: B images, N tokens, C channels, K classes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from backbones.hosts.lvt.mix_token import Tokens
from backbones.hosts.lvt.token_classifier import AUX_WEIGHT, TokenClassifier
from backbones.layers.classifier import Classifier


@functools.singledispatch
def classification_losses(
    classifier: Classifier, features: Any, labels: Tensor, label_smoothing: float
) -> dict[str, Tensor]:
    """The cross entropy of a classifier's logits, by the name that it is logged under.

    Args:
        classifier: Of a backbone; its class chooses the losses.
        features: What it reads, from its backbone's ``features``.
        labels: Indices (B,) or shares (B, K).
        label_smoothing: Share of the targets spread over all classes.
    """
    logits = classifier(features)
    return {"loss_cls": F.cross_entropy(logits, labels, label_smoothing=label_smoothing)}


@classification_losses.register
def token_losses(
    classifier: TokenClassifier, features: Tokens, labels: Tensor, label_smoothing: float
) -> dict[str, Tensor]:
    """The class token's cross entropy plus half the mean of the other tokens', in training.

    There are no token labels, which a teacher network would have to make: every token has the label
    of its image. The class token has both labels of a mixed image, in the shares of MixToken. In
    evaluation it is the cross entropy of the logits, as of any classifier.

    Args:
        classifier: LVT's.
        features: Tokens (B, 1 + N, C), the class token first.
        labels: Indices (B,) or shares (B, K).
        label_smoothing: Share of the targets spread over all classes.

    Returns:
        The sum by the name "loss_cls"; in training also its parts, to be logged.

    Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision
    Transformers", NeurIPS 2021, https://arxiv.org/abs/2104.10858.
    """
    cross_entropy = functools.partial(F.cross_entropy, label_smoothing=label_smoothing)
    if not classifier.training:
        return {"loss_cls": cross_entropy(classifier(features), labels)}
    logits, token_logits = classifier.outputs(features)
    own = cross_entropy(logits, labels)
    if features.own_share < 1:
        other = cross_entropy(logits, labels.flip(0))
        own = features.own_share * own + (1 - features.own_share) * other
    each = labels[..., None].expand(*labels.shape, token_logits.shape[1])
    aux = cross_entropy(token_logits.transpose(1, 2), each)
    return {"loss_cls": own + AUX_WEIGHT * aux, "class_token": own, "tokens": aux}
