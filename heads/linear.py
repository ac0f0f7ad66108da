"""Classifiers on a backbone: the published classification network, and the linear probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import LoadReport, adopt, convert
from backbones.checkpoints.opening import open_checkpoint
from backbones.layers.bounds import check_range, check_share
from backbones.layers.classifier import Classifier
from backbones.options import Remembering
from heads.losses import Targets, classification_losses

OPTIONAL = ("taught", "token_labels", "label_loss")  # entries of a batch
TARGETS = ("LinearClassifier", "LinearProbe")


class LinearClassifier(Remembering, nn.Module):
    """Image classifier: a backbone with its own norm, pooling and classifier.

    The classifier is one linear layer unless the host defines another (``Backbone.classifier``).

    Args:
        backbone: Backbone built with ``dense=False``.
        num_classes: Width of the logits K.
        label_smoothing: Share of the target spread over all classes, in training only.
        drop: Dropout before the classifier.

    Attributes:
        keeps_classifier: True if a training may start from a trained classifier.

    Shape: (B, 3, H, W) -> (B, K).
    """

    keeps_classifier = True

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        label_smoothing: float = 0.0,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        check_range("num_classes", num_classes, 1)
        for name, share in (("label_smoothing", label_smoothing), ("drop", drop)):
            check_share(f"head.{name}", share)
        self.backbone = backbone
        self.classifier = self._make_classifier(num_classes, drop)
        self.label_smoothing = label_smoothing

    @property
    def num_classes(self) -> int:
        """K."""
        return int(self.classifier.out_features)

    @classmethod
    def from_pretrained(cls, name: str, path: str | Path, **backbone_options: Any) -> Self:
        """Build backbone and classifier from one released checkpoint: ours, timm's or the authors'.

        Args:
            name: Registered backbone name.
            path: A .pth/.ckpt/.safetensors file with the weights of both.
            **backbone_options: Options of ``create_backbone``.

        Raises:
            ValueError: The file lacks the classifier or a mixer, or has weights of another model.

        >>> model = LinearClassifier(create_backbone("resnet18"), num_classes=3)
        >>> torch.save(model.state_dict(), "resnet18.pth")
        >>> LinearClassifier.from_pretrained("resnet18", "resnet18.pth").num_classes
        3
        """
        backbone = create_backbone(name, **backbone_options)
        converted = convert(open_checkpoint(path), backbone)
        converted.check(trained=True)  # another model's classifier may have another name
        model = cls(backbone, num_classes=converted.num_classes)
        adopt(model, converted)
        return model

    def load_weights(self, path: str | Path) -> LoadReport:
        """Load backbone and classifier from a file of ours, timm's or the authors'.

        Raises:
            ValueError: The file lacks a mixer, or has another model's weights or class count.
        """
        return adopt(self, convert(open_checkpoint(path), self.backbone))

    def _make_classifier(self, num_classes: int, drop: float) -> Classifier:
        return self.backbone.classifier(num_classes, drop)

    def _features(self, images: Tensor) -> Any:
        return self.backbone.features(images)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images: (B, 3, H, W) -> logits (B, K)."""
        return self.classifier(self._features(images))

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the losses of ``image`` with ``label``, indices (B,) or shares (B, K).

        Optional entries of the batch are ``taught``, ``token_labels`` and ``label_loss``; see
        ``Targets``.
        """
        smoothing = self.label_smoothing if self.training else 0.0
        optional = {key: batch[key] for key in OPTIONAL if batch.get(key) is not None}
        targets = Targets(batch["label"], smoothing, **optional)
        return classification_losses(self.classifier, self._features(batch["image"]), targets)

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, K) of ``batch["image"]``."""
        return self(batch["image"])


class LinearProbe(LinearClassifier):
    """Linear classifier on a frozen backbone, after a BatchNorm without scale and shift.

    The backbone stays in evaluation mode, which fixes its BatchNorm statistics, and gets no
    gradient. The added BatchNorm lets one learning rate fit all backbones.

    Source: He et al., "Masked Autoencoders", CVPR 2022, App. A.1 (linear probing).
    """

    keeps_classifier = False

    def __init__(self, backbone: Backbone, num_classes: int) -> None:
        super().__init__(backbone, num_classes)
        self.norm = nn.BatchNorm1d(backbone.num_features, affine=False, eps=1e-6)
        self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Switch the probe; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def _make_classifier(self, num_classes: int, drop: float) -> Classifier:
        """Return one linear layer, also for backbones with another classifier."""
        return Classifier(self.backbone.num_features, num_classes, drop)

    def _features(self, images: Tensor) -> Any:
        with torch.no_grad():
            embedding = self.backbone.embed(images)
        return self.norm(embedding)
