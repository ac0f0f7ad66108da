"""Inputs and outputs of tasks: batches, models, rows of predictions.

A batch is a dictionary. Of classification it holds ``image``, normalised floats (B, 3, H, W);
``label``, whole numbers (B,) or shares of the classes (B, K); and maybe ``sample_id`` (B,), the
places in the data set, by which predictions name their files. Of detection and segmentation it is
the MM toolkits': ``inputs``, a list of uint8 images (3, H, W) in BGR, and ``data_samples``, a list
of their ``DetDataSample`` or ``SegDataSample`` with the annotations.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Any]
Row = dict[str, Any]


class Model(Protocol):
    """A backbone with a head: the only model a task sees."""

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars; those with "loss" in the name are summed, the others only logged."""

    def predict(self, batch: Batch) -> Any:
        """Predictions in the form that the task's metric takes."""


def check_batch(batch: Any) -> None:
    """Refuse what is not a batch of a task.

    Raises:
        ValueError: Says which form a batch has.
    """
    names = {"image", "inputs", "unreadable"}  # an image that cannot be read is told, too
    if isinstance(batch, dict) and (not batch or names & batch.keys()):
        return
    held = f"with the keys {list(batch)}" if isinstance(batch, dict) else "without names"
    raise ValueError(
        f"this batch is a {type(batch).__name__} {held}; a batch is a dictionary: "
        '{"image": (B, 3, H, W), "label": (B,)} for classification, {"inputs": ..., '
        '"data_samples": ...} for the other tasks. Let the data set return such items'
    )


def batch_size(batch: Batch) -> int:
    """Images in a batch of ours ("image") or of the MM toolkits ("inputs")."""
    return len(batch["image"] if "image" in batch else batch["inputs"])


def batches_of_step(trainer: Any, batch_idx: int) -> int:
    """Batches that the optimiser step of a batch has: fewer at the end of an epoch, maybe.

    Args:
        trainer: Accumulates ``accumulate_grad_batches``, anew in each epoch.
        batch_idx: Within the epoch.
    """
    most = trainer.accumulate_grad_batches
    return int(min(most, trainer.num_training_batches - batch_idx // most * most))
