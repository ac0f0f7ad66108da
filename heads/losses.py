"""Losses of classifiers: that of the labels, and more for classifiers with several outputs.

Axes: B images, N tokens, C channels, K classes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from backbones.hosts.lvt.mix_token import Tokens
from backbones.hosts.lvt.token_classifier import AUX_WEIGHT, TokenClassifier
from backbones.layers.classifier import Classifier
from backbones.layers.two_tokens import TwoTokenClassifier
from heads.distillation import TeacherLogits, add_teacher_loss
from heads.label_losses import LabelLoss

CROSS_ENTROPY = LabelLoss()


class Targets(NamedTuple):
    """Targets of a classifier for the images of a batch.

    Attributes:
        labels: Indices (B,) or shares (B, K).
        label_smoothing: Share of the targets spread over all classes.
        taught: A teacher's logits, if there is a teacher.
        token_labels: Shares (B, K, 1 + N) for the whole image and each token, if there are any; see
            ``heads.token_label_maps``.
        label_loss: Loss of the logits against the labels.
    """

    labels: Tensor
    label_smoothing: float = 0.0
    taught: TeacherLogits | None = None
    token_labels: Tensor | None = None
    label_loss: LabelLoss = CROSS_ENTROPY

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (B, K, ...) against labels."""
        return self.label_loss(logits, labels, self.label_smoothing)


@functools.singledispatch
def classification_losses(
    classifier: Classifier, features: Any, targets: Targets
) -> dict[str, Tensor]:
    """Return the labels' loss of the logits and the teacher's loss, by their logged names.

    Args:
        classifier: Classifier of a backbone; its class selects the losses.
        features: Its input, from its backbone's ``features``.
        targets: Targets of the batch.

    Raises:
        ValueError: The batch has token labels, but the classifier lacks token outputs.
    """
    _refuse_token_labels(targets)
    logits = classifier(features)
    label_loss = targets.own_loss(logits, targets.labels)
    return add_teacher_loss(label_loss, logits, targets.taught)


NO_TOKENS = (
    "token labels need a network that classifies its tokens, backbone=lvt_r1 to lvt_r4 with its "
    "class blocks; pass data.token_labels=null for this one"
)


def _refuse_token_labels(targets: Targets) -> None:
    if targets.token_labels is not None:
        raise ValueError(NO_TOKENS)


@classification_losses.register
def two_token_losses(
    classifier: TwoTokenClassifier, features: Tensor, targets: Targets
) -> dict[str, Tensor]:
    """Return losses in which the class token learns labels and the distillation token the teacher.

    Without a teacher, and in evaluation, this is the cross entropy of the mean of both logits.

    Args:
        classifier: Classifier of a distilled DeiT.
        features: (B, 2, C), the class token first.
        targets: Targets of the batch.

    Raises:
        ValueError: The batch has token labels, but the classifier lacks token outputs.

    Source: Touvron et al., "Training data-efficient image transformers", ICML 2021,
    https://arxiv.org/abs/2012.12877, Sec. 4.
    """
    _refuse_token_labels(targets)
    own_loss = targets.own_loss
    if not classifier.training or targets.taught is None:
        logits = classifier(features)
        return add_teacher_loss(own_loss(logits, targets.labels), logits, targets.taught)
    logits, distilled = classifier.outputs(features)
    return add_teacher_loss(own_loss(logits, targets.labels), distilled, targets.taught)


@classification_losses.register
def token_losses(
    classifier: TokenClassifier, features: Tokens, targets: Targets
) -> dict[str, Tensor]:
    """Return the class token's cross entropy plus half the other tokens' mean, in training.

    Both use token labels; without them every token has the label of its image. The class token
    learns both labels of a mixed image, in MixToken's shares, and learns from a teacher. In
    evaluation this is the cross entropy of the logits.

    Args:
        classifier: LVT's classifier.
        features: Tokens (B, 1 + N, C), the class token first.
        targets: Targets of the batch.

    Returns:
        The sum as "loss_cls"; in training also its parts, for the log.

    Raises:
        ValueError: The number of token labels differs from that of tokens.

    Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision
    Transformers", NeurIPS 2021, https://arxiv.org/abs/2104.10858, with the weight of LVT's code.
    """
    own_loss = targets.own_loss
    if not classifier.training:
        logits = classifier(features)
        return add_teacher_loss(own_loss(logits, targets.labels), logits, targets.taught)
    logits, token_logits = classifier.outputs(features)
    image, token_targets = _split_labels(targets, token_logits.shape[1])
    # Processes draw their own shares, and each call of a weighted loss exchanges its weights.
    flipped_loss = own_loss(logits, image.flip(0))
    class_loss = (
        features.own_share * own_loss(logits, image) + (1 - features.own_share) * flipped_loss
    )
    aux = own_loss(token_logits.transpose(1, 2), token_targets)
    losses = add_teacher_loss(class_loss + AUX_WEIGHT * aux, logits, targets.taught)
    return {**losses, "class_token": class_loss, "tokens": aux}


def _split_labels(targets: Targets, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the labels of the image, (B,) or (B, K), and of its tokens, (B, N) or (B, K, N)."""
    if targets.token_labels is None:
        labels = targets.labels
        return labels, labels[..., None].expand(*labels.shape, num_tokens)
    count = targets.token_labels.shape[2] - 1
    if count != num_tokens:
        raise ValueError(f"{count} token labels per image do not match {num_tokens} tokens")
    return targets.token_labels[:, :, 0], targets.token_labels[:, :, 1:]
