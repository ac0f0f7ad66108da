"""Inputs and outputs of tasks: batches, models, rows of predictions.

A batch is a dictionary whose first entry is the input; each ``Family.batch`` lists its entries.
``sample_id`` (B,), the places in the data set, names the inputs of predictions.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tasks.engine.family import Family

Batch = dict[str, Any]
Row = dict[str, Any]
UNREADABLE = "unreadable"  # key of the inputs of a batch, and of the reason in a row


class Model(Protocol):
    """A backbone with a head: the only model a task sees."""

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return scalars; those with "loss" in the name are summed, the others only logged."""

    def predict(self, batch: Batch) -> Any:
        """Return predictions in the form that the task's metric takes."""


def check_batch(batch: Any, family: Family) -> None:
    """Refuse what is not a batch of a family.

    Raises:
        ValueError: States the form of a batch.
    """
    expected = next(iter(family.batch))
    if isinstance(batch, dict) and (not batch or {expected, UNREADABLE} & batch.keys()):
        return
    held = f"with the keys {list(batch)}" if isinstance(batch, dict) else "without names"
    form = ", ".join(f'"{name}": {shape}' for name, shape in family.batch.items())
    raise ValueError(
        f"this batch is a {type(batch).__name__} {held}; a batch for {family.name} is a "
        f"dictionary {{{form}}}. Let the data set return such items"
    )


def batch_size(batch: Batch) -> int:
    """Return the number of inputs in a batch."""
    return len(next(iter(batch.values())))


def input_names(batch: Batch, datamodule: Any, modality: str) -> list[str]:
    """Return the names of a batch's inputs, or numbers if the datamodule has none."""
    samples = batch.get("sample_id")
    if samples is None or not hasattr(datamodule, "predict_name"):
        return [f"{modality} {index}" for index in range(batch_size(batch))]
    return [datamodule.predict_name(sample) for sample in samples.tolist()]


def is_spare(trainer: Any) -> bool:
    """Return True in a process beyond the number of examples, whose one example is another's."""
    if trainer is None or trainer.world_size == 1:
        return False
    stage = "predict" if trainer.predicting else "test" if trainer.testing else "val"
    loader = getattr(trainer, f"{stage}_dataloaders")
    return bool(trainer.global_rank >= len(loader.dataset))


def batches_of_step(trainer: Any, batch_idx: int) -> int:
    """Return the batches of a batch's optimiser step: maybe fewer at the end of an epoch.

    Args:
        trainer: Accumulates ``accumulate_grad_batches``, anew in each epoch.
        batch_idx: Within the epoch.
    """
    most = trainer.accumulate_grad_batches
    return int(min(most, trainer.num_training_batches - batch_idx // most * most))
