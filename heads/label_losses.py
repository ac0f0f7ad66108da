"""Losses of classifiers by name: for one label per image, and for any number of labels.

Axes: B images, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from timm.loss import AsymmetricLossMultiLabel, AsymmetricLossSingleLabel, BinaryCrossEntropy
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from backbones.layers.bounds import check_range
from backbones.layers.precision import at_least_float32
from heads.global_mean import global_mean

asymmetric_single: Any = AsymmetricLossSingleLabel  # timm's classes are untyped
asymmetric_multi: Any = AsymmetricLossMultiLabel
binary_cross_entropy: Any = BinaryCrossEntropy

Name = Literal["cross_entropy", "bce", "focal", "asymmetric"]
BALANCED = "balanced"


class LabelLoss:
    """Loss of logits against labels, and the options of ``task.loss``.

    One label per image: "cross_entropy"; "focal", whose term of a class of probability p has the
    factor (1 - p)^gamma; "bce", timm's binary cross entropy of each class against the others; and
    timm's "asymmetric". Any number of labels: "bce", torchvision's "focal" and timm's "asymmetric";
    the last sums over the classes, the others average.

    Source: focal loss, Lin et al., https://arxiv.org/abs/1708.02002, equations 4 and 5; asymmetric
    loss, Ridnik et al., https://arxiv.org/abs/2009.14119, equation 7; bce for one label, Wightman
    et al., https://arxiv.org/abs/2110.00476, section 2.2.

    Args:
        name: Name of the loss; None for ``usual``.
        class_weights: Weight per class of losses of one label, or "balanced" for N / (K N_k), with
            N_k of N training images in class k. ``prepare`` computes these.
        gamma: Exponent of "focal", 2 by default.
        alpha: Weight of present labels in "focal" of several labels, 1 - alpha of absent ones;
            0.25 by default.
        gamma_pos: Exponent of present labels in "asymmetric", 1 by default.
        gamma_neg: Exponent of absent labels in "asymmetric", 4 by default.
        clip: Margin that "asymmetric" of several labels subtracts from probabilities of absent
            labels, 0.05 by default.

    Attributes:
        multi_label: True for any number of labels per image.
        usual: Name of the default.

    Raises:
        ValueError: An option is out of range, or the loss lacks it.
    """

    multi_label: ClassVar[bool] = False
    usual: ClassVar[str] = "cross_entropy"
    takes: ClassVar[dict[tuple[bool, str], tuple[str, ...]]] = {
        (False, "cross_entropy"): ("class_weights",),
        (False, "bce"): ("class_weights",),
        (False, "focal"): ("class_weights", "gamma"),
        (False, "asymmetric"): ("gamma_pos", "gamma_neg"),
        (True, "bce"): (),
        (True, "focal"): ("gamma", "alpha"),
        (True, "asymmetric"): ("gamma_pos", "gamma_neg", "clip"),
    }

    def __init__(
        self,
        name: Name | None = None,
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        gamma: float | None = None,
        alpha: float | None = None,
        gamma_pos: float | None = None,
        gamma_neg: float | None = None,
        clip: float | None = None,
    ) -> None:
        self.name: str = name or self.usual
        valid_names = [loss for several, loss in self.takes if several == self.multi_label]
        if self.name not in valid_names:
            raise ValueError(f"task.loss.name={name} must be one of {', '.join(valid_names)} here")
        loss_options = {
            "class_weights": class_weights, "gamma": gamma, "alpha": alpha,
            "gamma_pos": gamma_pos, "gamma_neg": gamma_neg, "clip": clip,
        }  # fmt: skip
        self._check(loss_options)
        self.class_weights = class_weights
        self.gamma = 2.0 if gamma is None else gamma
        self.alpha = 0.25 if alpha is None else alpha
        self.gamma_pos = 1.0 if gamma_pos is None else gamma_pos
        self.gamma_neg = 4.0 if gamma_neg is None else gamma_neg
        self.clip = 0.05 if clip is None else clip
        self.weights: Tensor | None = None
        if class_weights is not None and not isinstance(class_weights, str):
            self.weights = torch.tensor([float(weight) for weight in class_weights])

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse options that the loss lacks or that are out of range."""
        valid_options = self.takes[self.multi_label, self.name]
        for option, value in options.items():
            if value is None:
                continue
            if option not in valid_options:
                raise ValueError(
                    f"task.loss.{option} does not apply to {self.name} here, which takes "
                    f"{', '.join(valid_options) or 'no options'}; leave it out"
                )
            if option == "class_weights":
                _check_weights(value)
            else:
                most = 1 if option in ("alpha", "clip") else math.inf
                check_range(f"task.loss.{option}", value, 0, most)

    @property
    def is_usual(self) -> bool:
        """True for the default without weights."""
        return self.name == self.usual and self.class_weights is None

    @property
    def is_cross_entropy(self) -> bool:
        """True for cross entropy without weights."""
        return self.name == "cross_entropy" and self.class_weights is None

    @property
    def needs_counts(self) -> bool:
        """True if ``prepare`` must be called."""
        return self.class_weights == BALANCED

    def check_classes(self, num_classes: int) -> None:
        """Refuse another number of weights than of classes.

        Raises:
            ValueError: States both numbers.
        """
        if self.weights is not None and len(self.weights) != num_classes:
            raise ValueError(
                f"task.loss.class_weights has {len(self.weights)} weights, but the data have "
                f"{num_classes} classes; pass one weight per class, or balanced"
            )

    def prepare(self, counts: Sequence[int]) -> None:
        """Compute balanced weights from the number of training images per class.

        Raises:
            ValueError: A class lacks images.
        """
        if min(counts) < 1:
            raise ValueError(
                f"task.loss.class_weights=balanced, but class {list(counts).index(min(counts))} "
                "lacks training images; pass a list of weights"
            )
        self.weights = sum(counts) / (len(counts) * torch.tensor(counts, dtype=torch.float32))

    def __call__(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of logits (B, K, ...), a scalar.

        Args:
            logits: Further axes, such as tokens, count as images.
            labels: Indices (B, ...) or shares (B, K, ...); with ``multi_label`` 0 and 1 of (B, K).
            smoothing: Share of the labels spread over all classes, or towards 1/2 with several.

        Raises:
            ValueError: Shares meet "asymmetric", which takes indices.
        """
        logits = at_least_float32(logits)
        if self.is_cross_entropy:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        classes = logits.shape[1]
        if labels.ndim == logits.ndim:
            labels = labels.movedim(1, -1).reshape(-1, classes).to(logits.dtype)
        else:
            labels = labels.reshape(-1)
        logits = logits.movedim(1, -1).reshape(-1, classes)
        weights = None if self.weights is None else self.weights.to(logits)
        if self.multi_label:
            return self._several(logits, labels, smoothing)
        return self._loss_of_labels(logits, labels, smoothing, weights)

    def _several(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        if self.name == "asymmetric":
            loss: Tensor = asymmetric_multi(
                self.gamma_neg, self.gamma_pos, self.clip, smoothing=smoothing
            )(logits, labels)
            return loss
        labels = labels * (1 - smoothing) + smoothing / 2
        if self.name == "focal":
            return sigmoid_focal_loss(logits, labels, self.alpha, self.gamma, "mean")
        return F.binary_cross_entropy_with_logits(logits, labels)

    def _loss_of_labels(
        self, logits: Tensor, labels: Tensor, smoothing: float, weights: Tensor | None
    ) -> Tensor:
        if self.name == "cross_entropy" and weights is not None and labels.ndim == 1:
            total = F.cross_entropy(
                logits, labels, weights, label_smoothing=smoothing, reduction="sum"
            )
            return global_mean(total, weights[labels].sum())
        if self.name == "cross_entropy":  # torch averages over the images if labels are shares
            return F.cross_entropy(logits, labels, weights, label_smoothing=smoothing)
        if self.name == "asymmetric":
            if labels.ndim > 1:
                raise ValueError(
                    "task.loss.name=asymmetric takes one whole label per image, but these are "
                    "mixed; pass task.mixup=null"
                )
            loss: Tensor = asymmetric_single(self.gamma_pos, self.gamma_neg, smoothing)(
                logits, labels
            )
            return loss
        if self.name == "bce":
            loss = binary_cross_entropy(smoothing, weight=weights)(logits, labels)
            return loss
        shares = labels if labels.ndim > 1 else F.one_hot(labels, logits.shape[1]).to(logits)
        shares = shares * (1 - smoothing) + smoothing / logits.shape[1]
        weighted = shares if weights is None else shares * weights
        logs = logits.log_softmax(-1)
        terms = weighted * (1 - logs.exp()) ** self.gamma * -logs
        return global_mean(terms.sum(), weighted.sum())


class MultiLabelLoss(LabelLoss):
    """``LabelLoss`` for any number of labels per image."""

    multi_label = True
    usual = "bce"


def _check_weights(value: Any) -> None:
    if value == BALANCED:
        return
    if isinstance(value, str) or not value or not all(weight > 0 for weight in value):
        raise ValueError(
            f"task.loss.class_weights={value} must be balanced, or a list of a positive weight per "
            "class"
        )
