"""Inputs and outputs of tasks: batches, models, rows of predictions.

A batch is a dictionary with the input as its first entry; ``Family.batch`` lists all entries.
``sample_id`` (B,), indices into the data set, identifies the inputs of predictions.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tasks.engine.family import Family

Batch = dict[str, Any]
Row = dict[str, Any]
Summed = tuple[Tensor, Tensor]  # a sum over inputs or pixels, and their number
UNREADABLE = "unreadable"  # key of a batch's unreadable inputs, and of the reason in a row


class Model(Protocol):
    """Backbone with a head, as tasks use it."""

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return scalars; those with "loss" in the name are summed, the others only logged."""

    def predict(self, batch: Batch) -> Any:
        """Return predictions in the form that the task's metric takes."""


def check_batch(batch: Any, family: Family) -> None:
    """Refuse anything but a batch of a family.

    Raises:
        ValueError: States the form of a batch.
    """
    expected = next(iter(family.batch))
    if isinstance(batch, dict) and (not batch or {expected, UNREADABLE} & batch.keys()):
        return
    content = f"with the keys {list(batch)}" if isinstance(batch, dict) else "without names"
    form = ", ".join(f'"{name}": {shape}' for name, shape in family.batch.items())
    raise ValueError(
        f"this batch is a {type(batch).__name__} {content}; a batch for {family.name} is a "
        f"dictionary {{{form}}}. Let the data set return such items"
    )


def batch_size(batch: Batch) -> int:
    """Return the number of inputs in a batch."""
    return len(next(iter(batch.values())))


def input_names(batch: Batch, datamodule: Any, modality: str) -> list[str]:
    """Return the names of a batch's inputs; numbers if the datamodule lacks names."""
    samples = batch.get("sample_id")
    if samples is None or not hasattr(datamodule, "predict_name"):
        return [f"{modality} {index}" for index in range(batch_size(batch))]
    return [datamodule.predict_name(sample) for sample in samples.tolist()]


def is_spare(trainer: Any) -> bool:
    """Return True in a process beyond the number of examples; it repeats another's example."""
    if trainer is None or trainer.world_size == 1:
        return False
    stage = "predict" if trainer.predicting else "test" if trainer.testing else "val"
    loader = getattr(trainer, f"{stage}_dataloaders")
    return bool(trainer.global_rank >= len(loader.dataset))


def batches_of_step(trainer: Any, batch_idx: int) -> int:
    """Return the number of batches in a batch's optimiser step; fewer at the end of an epoch.

    Args:
        trainer: Trainer with ``accumulate_grad_batches``, counted anew in each epoch.
        batch_idx: Index of the batch within the epoch.
    """
    most = trainer.accumulate_grad_batches
    return int(min(most, trainer.num_training_batches - batch_idx // most * most))
