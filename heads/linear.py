"""The linear classifier: with its backbone, the published classification network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone, create_backbone
from backbones.weights import LoadReport, load_state_dict, read_state_dict


class LinearClassifier(nn.Module):
    """Images to logits through a backbone's own norm and pooling and one linear layer.

    Args:
        backbone: Built with ``dense=False``.
        num_classes: Width of the logits K.
        label_smoothing: Share of the target spread over all classes, in training only.
        drop: Dropout before the linear layer.

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
        self.backbone = backbone
        self.drop = nn.Dropout(drop)
        self.classifier = nn.Linear(backbone.num_features, num_classes)
        self.label_smoothing = label_smoothing
        nn.init.trunc_normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    @classmethod
    def from_pretrained(cls, name: str, path: str | Path, **backbone_options: Any) -> Self:
        """Backbone and classifier out of one released checkpoint: ours, timm's or the authors'.

        Args:
            name: Registered backbone name.
            path: A .pth/.ckpt/.safetensors file that holds both.
            **backbone_options: For ``create_backbone``.

        Raises:
            ValueError: The file holds no classifier, or weights of another model.
        """
        backbone = create_backbone(name, **backbone_options)
        state_dict = read_state_dict(path)
        load_state_dict(backbone, state_dict, str(path))
        weight, bias = _classifier(backbone.convert_state_dict(dict(state_dict)), path)
        model = cls(backbone, num_classes=len(weight))
        model.classifier.load_state_dict({"weight": weight, "bias": bias})
        return model

    def load_weights(self, path: str | Path) -> LoadReport:
        """Load backbone and classifier from a file of ours, timm's or the authors'.

        Raises:
            ValueError: Weights of another model, or of another number of classes.
        """
        state_dict = read_state_dict(path)
        weight, bias = _classifier(self.backbone.convert_state_dict(dict(state_dict)), path)
        if len(weight) != self.classifier.out_features:
            raise ValueError(
                f"{path} was trained on {len(weight)} classes, this data has "
                f"{self.classifier.out_features}"
            )
        report = load_state_dict(self.backbone, state_dict, str(path))
        self.classifier.load_state_dict({"weight": weight, "bias": bias})
        return report

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        return self.classifier(self.drop(self.backbone.embed(images)))

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cross entropy of ``image`` with ``label``, which is indices (B,) or shares (B, K)."""
        logits = self(batch["image"])
        smoothing = self.label_smoothing if self.training else 0.0
        return {"loss_cls": F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)}

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

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        with torch.no_grad():
            features = self.backbone.embed(images)
        return self.classifier(self.norm(features))


def _classifier(state_dict: Mapping[str, Tensor], path: str | Path) -> tuple[Tensor, Tensor]:
    weight, bias = state_dict.get("classifier.weight"), state_dict.get("classifier.bias")
    if weight is None or bias is None:
        raise ValueError(
            f"{path} holds no classifier, only a backbone: pass it as backbone.pretrained instead"
        )
    return weight, bias
