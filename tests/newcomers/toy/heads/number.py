"""A number from a backbone's embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.options import Remembering

TARGETS = ("NumberHead",)


class NumberHead(Remembering, nn.Module):
    """One linear layer on the embedding.

    Shape: an input of the backbone -> (B,).
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.linear = nn.Linear(backbone.num_features, 1)

    def forward(self, signals: Tensor) -> Tensor:
        """Return the numbers (B,)."""
        return self.linear(self.backbone.embed(signals)).squeeze(-1)

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean squared error."""
        return {"loss_number": F.mse_loss(self(batch["signal"]), batch["number"])}

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers of ``batch["signal"]``."""
        return self(batch["signal"])
