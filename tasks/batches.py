"""What tasks take in and give out: batches, models, rows of predictions."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Any]
Row = dict[str, Any]


class Model(Protocol):
    """What a head makes of a backbone: the only model a task sees."""

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars; those with "loss" in the name are summed, the others only logged."""

    def predict(self, batch: Batch) -> Any:
        """Predictions in the form that the task's metric takes."""


def batch_size(batch: Batch) -> int:
    """Images in a batch of ours ("image") or of the MM toolkits ("inputs")."""
    return len(batch["image"] if "image" in batch else batch["inputs"])
