"""Classifiers on a backbone: the published classification network, and the linear probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from backbones import Backbone, create_backbone
from backbones.checkpoints.loading import (
    LoadReport,
    load_state_dict,
    read_state_dict,
    refuse_untrained,
)
from backbones.layers.classifier import Classifier
from heads.losses import classification_losses


class LinearClassifier(nn.Module):
    """Images to logits through a backbone's own norm, pooling and classifier.

    The classifier is one linear layer, but for hosts that bring their own
    (``Backbone.classifier``).

    Args:
        backbone: Built with ``dense=False``.
        num_classes: Width of the logits K.
        label_smoothing: Share of the target spread over all classes, in training only.
        drop: Dropout before the classifier.

    Shape: (B, 3, H, W) -> (B, K).
    """

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        label_smoothing: float = 0.0,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        for name, share in (("label_smoothing", label_smoothing), ("drop", drop)):
            if not 0 <= share < 1:
                raise ValueError(f"head.{name} must be from 0 to below 1, got {share}")
        self.backbone = backbone
        self.classifier = self._make_classifier(num_classes, drop)
        self.label_smoothing = label_smoothing

    @classmethod
    def from_pretrained(cls, name: str, path: str | Path, **backbone_options: Any) -> Self:
        """Backbone and classifier out of one released checkpoint: ours, timm's or the authors'.

        Args:
            name: Registered backbone name.
            path: A .pth/.ckpt/.safetensors file that holds both.
            **backbone_options: For ``create_backbone``.

        Raises:
            ValueError: The file holds no classifier, or weights of another model; a mixer that it
                lacks makes it one.
        """
        backbone = create_backbone(name, **backbone_options)
        state_dict = read_state_dict(path)
        refuse_untrained(backbone, load_state_dict(backbone, state_dict, str(path)))
        tensors = _classifier(backbone.convert_state_dict(dict(state_dict)), path)
        model = cls(backbone, num_classes=len(tensors["weight"]))
        model._load_classifier(tensors, path)
        return model

    def load_weights(self, path: str | Path) -> LoadReport:
        """Load backbone and classifier from a file of ours, timm's or the authors'.

        Raises:
            ValueError: Weights of another model, or of another number of classes; a mixer that the
                file lacks makes it another model.
        """
        state_dict = read_state_dict(path)
        tensors = _classifier(self.backbone.convert_state_dict(dict(state_dict)), path)
        if len(tensors["weight"]) != self.classifier.out_features:
            raise ValueError(
                f"{path} was trained on {len(tensors['weight'])} classes, this data has "
                f"{self.classifier.out_features}"
            )
        report = load_state_dict(self.backbone, state_dict, str(path))
        refuse_untrained(self.backbone, report)
        self._load_classifier(tensors, path)
        return report

    def _load_classifier(self, tensors: Mapping[str, Tensor], path: str | Path) -> None:
        expected = {key: value.shape for key, value in self.classifier.state_dict().items()}
        if expected != {key: value.shape for key, value in tensors.items()}:
            raise ValueError(
                f"{path} holds the classifier tensors {_described(tensors)} where "
                f"{self.backbone.name} has {_described(self.classifier.state_dict())}; name the "
                "backbone and options it was trained with"
            )
        self.classifier.load_state_dict(tensors)

    def _make_classifier(self, num_classes: int, drop: float) -> Classifier:
        return self.backbone.classifier(num_classes, drop)

    def _features(self, images: Tensor) -> Any:
        return self.backbone.features(images)

    def forward(self, images: Tensor) -> Tensor:
        """The classifier on what the backbone gives: (B, 3, H, W) -> logits (B, K)."""
        return self.classifier(self._features(images))

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The classifier's losses of ``image`` with ``label``, indices (B,) or shares (B, K)."""
        smoothing = self.label_smoothing if self.training else 0.0
        features = self._features(batch["image"])
        return classification_losses(self.classifier, features, batch["label"], smoothing)

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, K) of ``batch["image"]``."""
        return self(batch["image"])


class LinearProbe(LinearClassifier):
    """A linear classifier on a frozen backbone, after a BatchNorm that only standardises.

    The backbone stays in evaluation mode (its BatchNorm statistics must not move) and takes no
    gradient. The BatchNorm without scale and shift makes one learning rate fit all backbones.

    Source: He et al., "Masked Autoencoders", CVPR 2022, App. A.1 (linear probing).
    """

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
        """One linear layer, whatever the backbone's own classifier is."""
        return Classifier(self.backbone.num_features, num_classes, drop)

    def _features(self, images: Tensor) -> Any:
        with torch.no_grad():
            embedding = self.backbone.embed(images)
        return self.norm(embedding)


def _classifier(state_dict: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """The classifier's tensors of a converted state dict, by their names in it."""
    prefix = "classifier."
    tensors = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    if not {"weight", "bias"} <= tensors.keys():
        raise ValueError(
            f"{path} holds no classifier, only a backbone: pass it as backbone.pretrained instead"
        )
    return tensors


def _described(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
