"""What classifiers are trained by: cross entropy, and more for those that give more than logits.

Axes: B images, N tokens, C channels, K classes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from backbones.hosts.lvt.mix_token import Tokens
from backbones.hosts.lvt.token_classifier import AUX_WEIGHT, TokenClassifier
from backbones.layers.classifier import Classifier
from backbones.layers.two_tokens import TwoTokenClassifier
from heads.distillation import Taught, with_teacher


class Targets(NamedTuple):
    """What a classifier learns of the images of a batch.

    Attributes:
        labels: Indices (B,) or shares (B, K).
        label_smoothing: Share of the targets spread over all classes.
        taught: What a teacher says of the images, if there is one.
        token_labels: Shares (B, K, 1 + N) of the whole image and of each token, if there are any;
            see ``heads.token_label_maps``.
    """

    labels: Tensor
    label_smoothing: float = 0.0
    taught: Taught | None = None
    token_labels: Tensor | None = None


@functools.singledispatch
def classification_losses(
    classifier: Classifier, features: Any, targets: Targets
) -> dict[str, Tensor]:
    """The cross entropy of a classifier's logits, and what a teacher adds, by the logged names.

    Args:
        classifier: Of a backbone; its class chooses the losses.
        features: What it reads, from its backbone's ``features``.
        targets: See there.

    Raises:
        ValueError: There are token labels, and the classifier knows no tokens.
    """
    if targets.token_labels is not None:
        raise ValueError(NO_TOKENS)
    logits = classifier(features)
    own = F.cross_entropy(logits, targets.labels, label_smoothing=targets.label_smoothing)
    return with_teacher(own, logits, targets.taught)


NO_TOKENS = (
    "token labels need a network that classifies its tokens, backbone=lvt_r1 to lvt_r4 with its "
    "class blocks; pass data.token_labels=null for this one"
)


@classification_losses.register
def two_token_losses(
    classifier: TwoTokenClassifier, features: Tensor, targets: Targets
) -> dict[str, Tensor]:
    """The class token learns from the labels, the distillation token from the teacher.

    Without a teacher, and in evaluation, it is the cross entropy of the mean of both, as of any
    classifier.

    Args:
        classifier: A distilled DeiT's.
        features: (B, 2, C), the class token first.
        targets: See there.

    Raises:
        ValueError: There are token labels, which the classifier knows no tokens for.

    Source: Touvron et al., "Training data-efficient image transformers", ICML 2021,
    https://arxiv.org/abs/2012.12877, Sec. 4.
    """
    if targets.token_labels is not None:
        raise ValueError(NO_TOKENS)
    cross_entropy = functools.partial(F.cross_entropy, label_smoothing=targets.label_smoothing)
    if not classifier.training or targets.taught is None:
        logits = classifier(features)
        return with_teacher(cross_entropy(logits, targets.labels), logits, targets.taught)
    logits, distilled = classifier.outputs(features)
    return with_teacher(cross_entropy(logits, targets.labels), distilled, targets.taught)


@classification_losses.register
def token_losses(
    classifier: TokenClassifier, features: Tokens, targets: Targets
) -> dict[str, Tensor]:
    """The class token's cross entropy plus half the mean of the other tokens', in training.

    Both learn from token labels. Without them every token has the label of its image. The class
    token has both labels of a mixed image, in the shares of MixToken, and is what learns from a
    teacher. In evaluation it is the cross entropy of the logits, as of any classifier.

    Args:
        classifier: LVT's.
        features: Tokens (B, 1 + N, C), the class token first.
        targets: See there.

    Returns:
        The sum by the name "loss_cls"; in training also its parts, to be logged.

    Raises:
        ValueError: Token labels of another number of tokens.

    Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision
    Transformers", NeurIPS 2021, https://arxiv.org/abs/2104.10858, with the weight of LVT's code.
    """
    smoothing = targets.label_smoothing
    cross_entropy = functools.partial(F.cross_entropy, label_smoothing=smoothing)
    if not classifier.training:
        logits = classifier(features)
        return with_teacher(cross_entropy(logits, targets.labels), logits, targets.taught)
    logits, token_logits = classifier.outputs(features)
    image, each = _labels_of_tokens(targets, token_logits.shape[1])
    own = cross_entropy(logits, image)
    if features.own_share < 1:
        other = cross_entropy(logits, image.flip(0))
        own = features.own_share * own + (1 - features.own_share) * other
    aux = cross_entropy(token_logits.transpose(1, 2), each)
    losses = with_teacher(own + AUX_WEIGHT * aux, logits, targets.taught)
    return {**losses, "class_token": own, "tokens": aux}


def _labels_of_tokens(targets: Targets, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The label of the image, (B,) or (B, K), and those of its tokens, (B, N) or (B, K, N)."""
    if targets.token_labels is None:
        labels = targets.labels
        return labels, labels[..., None].expand(*labels.shape, num_tokens)
    given = targets.token_labels.shape[2] - 1
    if given != num_tokens:
        raise ValueError(f"there are {given} token labels an image for {num_tokens} tokens")
    return targets.token_labels[:, :, 0], targets.token_labels[:, :, 1:]
