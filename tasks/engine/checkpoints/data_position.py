"""Position of a checkpoint in the data and the schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Position of a checkpoint in the data and the schedule.

    Attributes:
        step: Optimiser steps done.
        batches: Batches that each process has trained on, over all epochs.
        batches_per_epoch: The same in one epoch.
        world_size: Number of processes.
        validation_due: True if a validation comes next.
    """

    step: int
    batches: int
    batches_per_epoch: int
    world_size: int
    validation_due: bool = False

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, which is the number of completed epochs."""
        return self.batches // self.batches_per_epoch

    @property
    def batch(self) -> int:
        """Index of the next batch within its epoch."""
        return self.batches % self.batches_per_epoch
