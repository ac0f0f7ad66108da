"""All answers of an evaluation, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Answers(Metric):
    """Guesses, labels and groups of all texts, since correlations do not add up over batches."""

    full_state_update = False
    guesses: list[Tensor]
    labels: list[Tensor]
    groups: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("guesses", "labels", "groups"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, guesses: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add a batch: three of (B,)."""
        self.guesses.append(guesses)
        # Copies, as each tensor of a worker keeps a file open.
        self.labels.append(labels.clone())
        self.groups.append(groups.clone())

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return guesses, labels and groups (N,)."""
        if not len(self.guesses):
            no_answers = torch.zeros(0)
            return no_answers, no_answers, no_answers.long()
        guesses, labels, groups = (
            dim_zero_cat(values) for values in (self.guesses, self.labels, self.groups)
        )
        return guesses, labels, groups
